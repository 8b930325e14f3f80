"""The next batch's forward is launched right behind the optimizer's step, before the host goes on.

Between two updates the host logs, asks whether it is time to validate or to save, and takes the next batch;
for 1.3 ms of each the GPU waited (base model, H200; an update of 16,384 tokens takes 20 to 27, of 2,048 7.5).
But the next batch lies in fairseq's buffer by then. The trainer, when it comes to the batch, finds its
forward done, and an update computes the same (``fast/forward_ahead.py`` says what it looks at). Only in
fairseq's own loop, where it is known what happens between two updates.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from surface_fusion.quick_trainer import is_fairseqs_loop, seed_of_update


class Begun(NamedTuple):
    """A batch whose forward was begun."""

    batch: Mapping[str, Any]
    """As it lay in the buffer."""
    parts: list[tuple[Any, int]]
    on_gpu: Mapping[str, Any]


_given: tuple[int, Callable[[], Any]] = 0, lambda: None
"""The identity of the last batch that a buffer gave, and a weak reference to that buffer."""


def remember_buffer(next_batch: Callable[[Any], Any], buffered: Any) -> Any:
    """fairseq's ``BufferedIterator.__next__``; the buffer that gave a batch last holds the next, too."""
    global _given
    batch = next_batch(buffered)
    _given = id(batch), weakref.ref(buffered)
    return batch


def use_begun(
    train_step: Callable[..., Any], trainer: Any, samples: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """fairseq's ``Trainer.train_step``; a batch whose forward was begun is the one on the GPU already."""
    begun: Begun | None = vars(trainer).pop("begun", None)
    last, buffer = _given
    if samples and id(samples[-1]) == last:
        trainer.buffer_of_next = buffer
    if begun is not None and samples and samples[0] is begun.batch and _same(begun.parts, _parts(samples[0])):
        samples = [begun.on_gpu, *samples[1:]]
    try:
        return train_step(trainer, samples, *args, **kwargs)
    finally:
        vars(trainer).pop("buffer_of_next", None)  # an update that overflowed has not come to it


def begin_next(set_num_updates: Callable[..., Any], trainer: Any, num_updates: int) -> Any:
    """fairseq's ``Trainer.set_num_updates``, which follows the optimizer's step in a training."""
    buffered = vars(trainer).pop("buffer_of_next", lambda: None)()
    if buffered is not None and is_fairseqs_loop(trainer):
        try:
            _begin(trainer, buffered._queue.queue, seed_of_update(trainer, num_updates))
        except RuntimeError as error:
            if "out of memory" not in str(error):  # which fairseq can deal with in the batch's turn
                raise
    return set_num_updates(trainer, num_updates)


def _begin(trainer: Any, waiting: Sequence[Any], seed: int) -> None:
    step_of = getattr(trainer.get_criterion(), "step_of", lambda model: None)
    step = step_of(trainer.model)
    if step is None or not waiting:
        return
    batch = waiting[0]
    if isinstance(batch, dict) and batch:  # no end of the epoch, error, or dummy
        parts = _parts(batch)
        sample, _ = trainer._prepare_sample(batch)
        if step.begin(sample, seed):
            trainer.begun = Begun(batch, parts, sample)


def _parts(batch: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """All that a batch holds, and how often its tensors were changed."""
    parts: list[tuple[Any, int]] = []
    for part in batch.values():
        parts += _parts(part) if isinstance(part, dict) else [(part, getattr(part, "_version", 0))]
    return parts


def _same(one: list[tuple[Any, int]], other: list[tuple[Any, int]]) -> bool:
    return len(one) == len(other) and all(
        a is b and version == now for (a, version), (b, now) in zip(one, other, strict=True)
    )
