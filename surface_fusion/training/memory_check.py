"""Run the longest batch before training starts, so that it does not run out of memory hours later.

The batch with the most padded tokens goes forward and backward once, with Adam's state allocated. It does not
affect the training: the gradient is zeroed, and fairseq sets the seed before each update. Reported as fairseq
issue 2867.
"""

import logging
from typing import Any

import numpy as np
import torch
from fairseq.optim import MemoryEfficientFP16Optimizer

from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def run_longest_batch(trainer: Any, iterator: Any) -> None:
    """Run the longest batch of *iterator*, an epoch's iterator, forward and backward on *trainer*'s model.

    Raises:
        SurfaceFusionError: it does not fit into the GPU's memory.
    """
    batches = getattr(iterator, "frozen_batches", None)
    if batches is None or trainer.is_fsdp:
        return
    sizes = [len(batch) * max(map(iterator.dataset.num_tokens, batch)) for batch in batches]
    longest = batches[int(np.argmax(sizes))]
    batch = iterator.collate_fn([iterator.dataset[i] for i in longest])
    sample, _ = trainer._prepare_sample(batch)
    shape = " x ".join(str(n) for n in sample["net_input"]["prev_output_tokens"].shape)
    # Two moments; with a memory-efficient wrapper, float32 weights and gradients are allocated later as well.
    copies = 4 if isinstance(trainer.optimizer, MemoryEfficientFP16Optimizer) else 2
    try:
        adam = [torch.empty((copies, p.numel()), device=p.device) for p in trainer.model.parameters()]
        trainer.task.train_step(
            sample, trainer.model, trainer.criterion, trainer.optimizer, trainer.get_num_updates(), True
        )
        del adam
    except torch.cuda.OutOfMemoryError as error:
        raise SurfaceFusionError(
            f"the longest batch ({shape} target tokens) does not fit into the memory of the GPU; lower "
            f"--max-tokens ({trainer.cfg.dataset.max_tokens}) and raise --update-freq to make up for it"
        ) from error
    finally:
        trainer.zero_grad()
    logger.info(f"the longest batch ({shape} target tokens) fits into memory")
