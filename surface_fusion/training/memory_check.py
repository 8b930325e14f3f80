"""Run the longest batch before training starts, so that it does not run out of memory hours later (fs 2867).

The batch with the most padded tokens goes forward and backward once, with Adam's state allocated. It does not
affect the training: the gradient is zeroed, and fairseq sets the seed before each update.
"""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from fairseq.optim import MemoryEfficientFP16Optimizer

from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def remember_batches(get_train_iterator: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``Trainer.get_train_iterator``; keeps its first result for :func:`try_longest_batch`."""
    iterator = get_train_iterator(trainer, *args, **kwargs)
    if not hasattr(trainer, "longest_batch_tried"):
        trainer.longest_batch_iterator = iterator
    return iterator


def try_longest_batch(begin_epoch: Callable[..., Any], trainer: Any, epoch: int) -> Any:
    """fairseq's ``Trainer.begin_epoch``; before a process's first epoch, also runs the longest batch.

    Raises:
        SurfaceFusionError: the longest batch does not fit into the GPU's memory.
    """
    result = begin_epoch(trainer, epoch)
    iterator = vars(trainer).pop("longest_batch_iterator", None)
    trainer.longest_batch_tried = True
    batches = getattr(iterator, "frozen_batches", None)
    if batches is not None and not trainer.tpu and not trainer.is_fsdp:
        sizes = [len(batch) * max(map(iterator.dataset.num_tokens, batch)) for batch in batches]
        longest = batches[int(np.argmax(sizes))]
        _try(trainer, iterator.collate_fn([iterator.dataset[i] for i in longest]))
    return result


def _try(trainer: Any, batch: Any) -> None:
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
