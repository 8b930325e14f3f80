"""What the log says at the start about numbers that are not what they seem."""

import logging
from collections.abc import Callable, Iterator
from typing import Any

from surface_fusion.config import SurfaceFusionConfig
from surface_fusion.criterion import FusedLabelSmoothedCrossEntropyCriterion, unnormalised
from surface_fusion.fast.eligibility import unwrapped
from surface_fusion.ranges import check_config

logger = logging.getLogger(__name__)


def say_at_start(
    init: Callable[..., None],
    trainer: Any,
    cfg: Any,
    task: Any,
    model: Any,
    criterion: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """fairseq's ``Trainer.__init__``, and what :func:`notices` has to say of the training.

    Raises:
        SurfaceFusionError: a model of ours is to be trained with a number out of its range.
    """
    if isinstance(getattr(getattr(model, "decoder", None), "cfg", None), SurfaceFusionConfig):
        check_config(cfg)
    init(trainer, cfg, task, model, criterion, *args, **kwargs)
    for level, text in notices(model, criterion, getattr(cfg.optimizer, "_name", None)):
        logger.log(level, text)


def say_at_first_batch(valid_step: Callable[..., Any]) -> Callable[..., Any]:
    """fairseq's ``FairseqTask.valid_step``, which is preceded by :func:`notices` when it is first called."""
    said = False

    def wrapped(task: Any, sample: Any, model: Any, criterion: Any, **kwargs: Any) -> Any:
        nonlocal said
        if not said:
            said = True
            for level, text in notices(model, criterion, optimizer=None):
                logger.log(level, text)
        return valid_step(task, sample, model, criterion, **kwargs)

    return wrapped


def notices(model: Any, criterion: Any, optimizer: str | None) -> Iterator[tuple[int, str]]:
    """Levels and lines of the log.

    Args:
        model: perhaps inside distributed wrappers.
        optimizer: its name, if *model* is to be trained.
    """
    if unnormalised(model):
        text = (
            "--sf-mode hard: loss, nll_loss and ppl are of probabilities that sum to less than 1, as "
            "published"
        )
        if isinstance(criterion, FusedLabelSmoothedCrossEntropyCriterion):
            yield (
                logging.INFO,
                f"{text}; compare normalized_nll_loss (bits per token) and normalized_ppl with other models'",
            )
        else:
            yield (
                logging.WARNING,
                f"{text}: do not compare them with another model's; --criterion "
                "fused_label_smoothed_cross_entropy, the same loss, also logs normalized_nll_loss, "
                "--sf-renormalize makes the model's probabilities sum to 1",
            )
    cfg = getattr(getattr(unwrapped(model), "decoder", None), "cfg", None)
    rates = [getattr(getattr(cfg, stack, None), "layerdrop", 0) for stack in ("encoder", "decoder")]
    if optimizer == "flat_adam" and any(rates):
        yield (
            logging.INFO,
            "LayerDrop with --optimizer flat_adam: a layer that an update skips has a gradient of zero, its "
            "moments decay and its weights move on, as by adam in fp16 and in several processes; --optimizer "
            "adam in one process in fp32 leaves such a layer as it is",
        )
