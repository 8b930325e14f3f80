"""Ignore the dummy batches that pad the last update of an epoch."""

from collections.abc import Callable, Sequence
from typing import Any


def leave_out_dummies(
    train_step: Callable[..., Any], trainer: Any, samples: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """fairseq's ``Trainer.train_step``, without the dummy batches that pad the last update of an epoch.

    With ``--update-freq`` and several processes, an update may hold batches followed by a dummy batch.
    fairseq then counts the tokens of all of them as zero in that process, but still adds their gradient.
    FSDP keeps the dummies, because all its processes must take part in every batch.
    """
    real = [sample for sample in samples if sample is not None and len(sample) > 0]
    return train_step(trainer, samples if trainer.is_fsdp or not real else real, *args, **kwargs)
