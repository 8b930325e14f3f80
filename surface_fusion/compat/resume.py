"""Resume with the batches and schedule of the interrupted training (fairseq issues 781 and 3638).

If the state of the checkpoint does not fit the training, the error names fairseq's flag to reset it.
"""

import logging
from typing import Any

from surface_fusion.compat.patching import Original, arguments, repair
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)

EPOCHS = "fairseq.data.iterators.EpochBatchIterator"
PLATEAU = "fairseq.optim.lr_scheduler.reduce_lr_on_plateau.ReduceLROnPlateauLRSchedule"


@repair(
    "fairseq.tasks.fairseq_task.FairseqTask.get_batch_iterator",
    probe="resume_makes_other_batches",
    report="fs 781",
)
def reuse_first_epochs_batches(
    get_batch_iterator: Original, task: Any, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """Make the same batches after a resume; fairseq makes others, and repeats and skips sentences.

    fairseq groups sentences into batches once, seeded by the epoch that the process starts in, and only
    shuffles these batches in later epochs.
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


@repair(f"{EPOCHS}.state_dict", probe="number_of_processes_is_not_saved", report="fs 3638")
def save_process_count(state_dict: Original, iterator: Any) -> dict[str, Any]:
    """Save the number of processes that share the batches."""
    return {**state_dict(iterator), "num_shards": iterator.num_shards}


@repair(f"{EPOCHS}.load_state_dict", probe="fewer_processes_repeat_sentences", report="fs 3638")
def rescale_position(load_state_dict: Original, iterator: Any, state: dict[str, Any]) -> None:
    """Rescale the offset after a resume with another number of processes; fairseq repeats or skips sentences.

    fairseq saves the number of batches per process, and skips that many per process.
    """
    then, now = state.get("num_shards", iterator.num_shards), iterator.num_shards
    if then != now and state.get("iterations_in_epoch", 0) > 0:
        seen = state["iterations_in_epoch"] * then
        state = {**state, "iterations_in_epoch": seen // now}
        again = "" if seen % now == 0 else f", except {seen % now} that are repeated"
        if iterator.grouped_shuffling:
            again += "; --grouped-shuffling orders batches by the number of processes: other ones are skipped"
        logger.warning(
            f"checkpoint saved mid-epoch with {then} processes, resuming with {now}: skipping the first "
            f"{seen} batches{again}"
        )
    load_state_dict(iterator, state)


@repair("fairseq.trainer.Trainer.load_checkpoint", probe="resume_drops_validation_loss")
def with_last_validation(load: Original, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Report the validation loss of the last epoch to the schedule, before which fairseq has saved.

    ``reduce_lr_on_plateau`` would resume with a learning rate that the uninterrupted training has reduced.
    """
    extra, given = load(trainer, *args, **kwargs), arguments(load, trainer, *args, **kwargs)
    if extra is not None and not given["reset_optimizer"] and not given["reset_lr_scheduler"]:
        position = extra["train_iterator"]
        if position.get("iterations_in_epoch") == 0 and extra.get("val_loss") is not None:
            trainer.lr_step(position["epoch"] - 1, extra["val_loss"])
    return extra


@repair("fairseq.checkpoint_utils.load_checkpoint", probe="finished_training_goes_on")
def end_finished_training(load: Original, cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Do no further update if a training that has reached its limit is started again; fairseq does one.

    fairseq compares ``--max-update`` and ``--stop-time-hours`` after an update only.
    """
    extra_state, epoch_itr = load(cfg, trainer, *args, **kwargs)
    limits = trainer.cfg.optimization
    hours = (extra_state or {}).get("previous_training_time", 0) / 3600
    for flag, limit, reached in (
        ("--max-update", limits.max_update, trainer.get_num_updates()),
        ("--max-epoch", limits.max_epoch, epoch_itr.next_epoch_idx - 1),
        ("--stop-time-hours", limits.stop_time_hours, hours),
    ):
        if 0 < limit <= reached:
            logger.info(
                f"nothing to do: {cfg.save_dir} has reached {flag} {limit:g}; raise it to train on, or give "
                "another --save-dir"
            )
            limits.max_epoch = -1  # fairseq begins no epoch
            break
    return extra_state, epoch_itr


@repair(f"{PLATEAU}.state_dict", probe="plateau_saves_no_bad_epochs")
def with_bad_epochs(state_dict: Original, schedule: Any) -> dict[str, Any]:
    """Save the number of epochs without a better loss in ``reduce_lr_on_plateau``."""
    return {**state_dict(schedule), "num_bad_epochs": schedule.lr_scheduler.num_bad_epochs}


@repair(f"{PLATEAU}.load_state_dict", probe="plateau_loads_no_bad_epochs")
def load_bad_epochs(load_state_dict: Original, schedule: Any, state: dict[str, Any]) -> None:
    """Load the number of epochs without a better loss in ``reduce_lr_on_plateau``."""
    load_state_dict(schedule, state)
    schedule.lr_scheduler.num_bad_epochs = state.get("num_bad_epochs", 0)


@repair("fairseq.trainer.Trainer.load_checkpoint", probe="reset_is_not_advised")
def with_advice_on_resets(load: Original, trainer: Any, filename: str, *args: Any, **kwargs: Any) -> Any:
    """Name ``--reset-optimizer`` in the error for the optimizer or schedule state of another training."""
    try:
        return load(trainer, filename, *args, **kwargs)
    except ValueError as error:
        if "parameter group" not in str(error):
            raise
        raise SurfaceFusionError(
            f"the optimizer state in {filename} does not match the parameters of this model; "
            "add --reset-optimizer"
        ) from error
    except KeyError as error:
        raise SurfaceFusionError(
            f"{filename} has no {error} for this training's optimizer or learning-rate schedule; add "
            "--reset-lr-scheduler or --reset-optimizer"
        ) from error
