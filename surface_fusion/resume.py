"""A resumed training sees the data that the interrupted one would have seen (fs 781, 5387, 848).

And where the checkpoint's state does not fit the training, fairseq's remedy is named.
"""

from collections.abc import Callable
from typing import Any

from surface_fusion.errors import SurfaceFusionError


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
