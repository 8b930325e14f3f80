"""Log once when the reported loss or the optimizer differs from what users expect."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from surface_fusion.criterions.fused_label_smoothed_cross_entropy import (
    FusedLabelSmoothedCrossEntropyCriterion,
    unnormalised,
)
from surface_fusion.modules.stacks import unwrapped

logger = logging.getLogger(__name__)


def log_notices(model: Any, criterion: Any, optimizer: str | None = None) -> None:
    """Log the :func:`notices` of a training or validation."""
    for level, text in notices(model, criterion, optimizer):
        logger.log(level, text)


def log_before_first_batch(valid_step: Callable[..., Any]) -> Callable[..., Any]:
    """fairseq's ``FairseqTask.valid_step``; logs the :func:`notices` before its first call."""
    logged = False

    def wrapped(task: Any, sample: Any, model: Any, criterion: Any, **kwargs: Any) -> Any:
        nonlocal logged
        if not logged:
            logged = True
            log_notices(model, criterion)
        return valid_step(task, sample, model, criterion, **kwargs)

    return wrapped


def notices(model: Any, criterion: Any, optimizer: str | None) -> Iterator[tuple[int, str]]:
    """Yield (level, line) pairs to log.

    Args:
        model: the model, possibly in distributed wrappers.
        optimizer: name of the optimizer if *model* is trained, else None.
    """
    if unnormalised(model):
        text = (
            "--sf-mode hard: loss, nll_loss and ppl are of probabilities that sum to less than 1, as "
            "published"
        )
        if isinstance(criterion, FusedLabelSmoothedCrossEntropyCriterion):
            text += "; compare normalized_nll_loss (bits per token) and normalized_ppl with other models'"
            yield logging.INFO, text
        else:
            text += (
                ": do not compare them with another model's; --criterion fused_label_smoothed_cross_entropy, "
                "the same loss, also logs normalized_nll_loss, --sf-renormalize makes the model's "
                "probabilities sum to 1"
            )
            yield logging.WARNING, text
    cfg = getattr(getattr(unwrapped(model), "decoder", None), "cfg", None)
    rates = [getattr(getattr(cfg, stack, None), "layerdrop", 0) for stack in ("encoder", "decoder")]
    if optimizer == "flat_adam" and any(rates):
        yield (
            logging.INFO,
            "LayerDrop with --optimizer flat_adam: a layer that an update skips has a gradient of zero, its "
            "moments decay and its weights move on, as by adam in fp16 and in several processes; --optimizer "
            "adam in one process in fp32 leaves such a layer as it is",
        )
