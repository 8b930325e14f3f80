"""Load a checkpoint with its task and a split of the data to analyse."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils, utils
from fairseq.models.transformer import TransformerModelBase
from omegaconf import OmegaConf

from surface_fusion.errors import SurfaceFusionError


@dataclass(frozen=True)
class Loaded:
    """A model in evaluation mode, its task, and the split of the data to analyse."""

    model: Any
    task: Any
    split: str

    def setting(self, name: str) -> Any:
        """Return a field of the model's configuration; None if a model of fairseq lacks it."""
        return getattr(self.model.cfg, name, None)

    def inapplicable(self, what: str, able: Iterable[str], verb: str) -> SurfaceFusionError:
        """Return the error of an analysis that does not apply, with the methods that it applies to."""
        method = self.setting("encoder_fusion")
        subject = f"--encoder-fusion {method} is none" if method else "the model has no --encoder-fusion"
        *names, last = able
        return SurfaceFusionError(f"{subject} that {what}; {', '.join(names)} and {last} {verb}")

    def batches(self, max_tokens: int = 4000) -> Iterator[dict[str, Any]]:
        """Yield the split in fairseq's batches, on the model's device.

        A batch has at most *max_tokens* tokens, or one longer sentence. Sentences that exceed the model's
        positions are left out, with a warning.
        """
        device = next(self.model.parameters()).device
        dataset = self.task.dataset(self.split)
        positions = utils.resolve_max_positions(self.task.max_positions(), self.model.max_positions())
        longest = int(dataset.num_tokens_vec(np.arange(len(dataset))).max(initial=0))
        iterator = self.task.get_batch_iterator(
            dataset,
            max_tokens=max(max_tokens, min(longest, max(positions))),
            max_positions=positions,
            ignore_invalid_inputs=True,
            num_workers=0,
            disable_iterator_cache=True,
        ).next_epoch_itr(shuffle=False)
        for batch in iterator:
            yield utils.move_to_cuda(batch) if device.type == "cuda" else batch


def load(checkpoint: str, data: str, split: str = "test", cpu: bool = False) -> Loaded:
    """Load *checkpoint*, and the dictionaries and the *split* of the folder *data*.

    Raises:
        SurfaceFusionError: the model is not one of fairseq's Transformers or a subclass.
    """
    models, cfg, task = checkpoint_utils.load_model_ensemble_and_task([checkpoint], {"data": data})
    model = models[0]
    if not isinstance(model, TransformerModelBase):
        raise SurfaceFusionError(f"{checkpoint} is a {type(model).__name__}; analyse reads Transformers only")
    task.load_dataset(split, task_cfg=OmegaConf.create(OmegaConf.to_container(cfg.task)))
    if torch.cuda.is_available() and not cpu:
        model.cuda()
    return Loaded(model.eval(), task, split)
