"""A resumed training sees the data that the interrupted one would have seen (fs 781, 5387, 848).

And where the checkpoint's state does not fit the training, fairseq's remedy is named.
"""

import logging
from collections.abc import Callable
from typing import Any

from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def with_first_epochs_batches(
    get_batch_iterator: Callable[..., Any], task: Any, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """fairseq's ``FairseqTask.get_batch_iterator``, with batches that a resume does not change.

    fairseq groups sentences into batches once, seeded by the epoch that the process starts in, and only
    shuffles these batches in later epochs. A training resumed in epoch 2 or later would make other batches:
    in the middle of an epoch it would repeat some sentences and leave others out.
    """
    epoch = kwargs.get("epoch", 1)
    made_once = (
        task.can_reuse_epoch_itr(dataset)
        and dataset not in task.dataset_to_epoch_iter
        and not kwargs.get("disable_iterator_cache")
        and not kwargs.get("update_epoch_batch_itr")
    )
    if epoch <= 1 or not made_once:
        return get_batch_iterator(task, dataset, *args, **kwargs)
    iterator = get_batch_iterator(task, dataset, *args, **{**kwargs, "epoch": 1})
    dataset.set_epoch(epoch)
    iterator.epoch = epoch
    return iterator


def with_processes(state_dict: Callable[[Any], dict[str, Any]], iterator: Any) -> dict[str, Any]:
    """fairseq's ``EpochBatchIterator.state_dict``, and how many processes share the batches."""
    return {**state_dict(iterator), "num_shards": iterator.num_shards}


def for_these_processes(
    load_state_dict: Callable[[Any, dict[str, Any]], None], iterator: Any, state: dict[str, Any]
) -> None:
    """fairseq's ``EpochBatchIterator.load_state_dict``, at the place where other processes stopped (fs 3638).

    fairseq saves how many batches each process has had, and skips as many for each of however many there are
    now: half an epoch is seen twice, left out, or ends in a "dataloader mismatch".
    """
    then, now = state.get("num_shards", iterator.num_shards), iterator.num_shards
    if then != now and state.get("iterations_in_epoch", 0) > 0:
        seen = state["iterations_in_epoch"] * then
        state = {**state, "iterations_in_epoch": seen // now}
        again = "" if seen % now == 0 else f", {seen % now} of them once more"
        if iterator.grouped_shuffling:
            again += "; --grouped-shuffling orders them by the number of processes, so that these are others"
        logger.warning(
            f"processes: {then} when the checkpoint was saved in the middle of an epoch, {now} now; they "
            f"go on behind its first {seen} batches{again}"
        )
    load_state_dict(iterator, state)


def with_last_validation(
    load_checkpoint: Callable[..., Any],
    trainer: Any,
    filename: str,
    reset_optimizer: bool = False,
    reset_lr_scheduler: bool = False,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """fairseq's ``Trainer.load_checkpoint``; the schedule learns the validation loss of a whole epoch.

    fairseq saves at the end of an epoch before it tells the schedule the loss. ``reduce_lr_on_plateau``
    would go on with a learning rate that the uninterrupted training has reduced.
    """
    extra = load_checkpoint(trainer, filename, reset_optimizer, reset_lr_scheduler, *args, **kwargs)
    if extra is not None and not reset_optimizer and not reset_lr_scheduler:
        place = extra["train_iterator"]
        if place.get("iterations_in_epoch") == 0 and extra.get("val_loss") is not None:
            trainer.lr_step(place["epoch"] - 1, extra["val_loss"])
    return extra


def with_bad_epochs(state_dict: Callable[[Any], dict[str, Any]], schedule: Any) -> dict[str, Any]:
    """fairseq's ``reduce_lr_on_plateau.state_dict``, and for how many epochs there was no better loss."""
    return {**state_dict(schedule), "num_bad_epochs": schedule.lr_scheduler.num_bad_epochs}


def load_bad_epochs(
    load_state_dict: Callable[[Any, dict[str, Any]], None], schedule: Any, state: dict[str, Any]
) -> None:
    """fairseq's ``reduce_lr_on_plateau.load_state_dict``, of which ``--lr-patience`` goes on counting."""
    load_state_dict(schedule, state)
    schedule.lr_scheduler.num_bad_epochs = state.get("num_bad_epochs", 0)


def with_advice_on_resets(
    load_checkpoint: Callable[..., Any], trainer: Any, filename: str, *args: Any, **kwargs: Any
) -> Any:
    """fairseq's ``Trainer.load_checkpoint``, whose failures say which state does not fit.

    Raises:
        SurfaceFusionError: the optimizer's or the learning-rate schedule's state is of another training.
    """
    try:
        return load_checkpoint(trainer, filename, *args, **kwargs)
    except ValueError as error:
        if "parameter group" not in str(error):
            raise
        raise SurfaceFusionError(
            f"the optimizer state in {filename} is of other parameters than this model's; add "
            "--reset-optimizer"
        ) from error
    except KeyError as error:
        raise SurfaceFusionError(
            f"{filename} has no {error} for this training's optimizer or learning-rate schedule; add "
            "--reset-lr-scheduler or --reset-optimizer"
        ) from error
