"""Launch the forward of the next batch right after the optimizer step.

Between two updates the host logs, checks whether to validate or save, and fetches the next batch. Meanwhile
the GPU was idle for 1.3 ms (base model, H200; an update takes 20 to 27 ms with 16,384 tokens, 7.5 ms with
2,048). The next batch is in fairseq's prefetch buffer by then, so its forward can start at once; when the
trainer reaches the batch, it uses the result. Updates are the same as without it:
``packed/forward_prefetch.py`` checks that nothing relevant has changed. Used in fairseq's own
training loop only.
"""

import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from surface_fusion.training.trainer import is_fairseqs_loop, seed_of_update


class Begun(NamedTuple):
    """A batch whose forward was launched."""

    batch: Mapping[str, Any]
    """The batch in the buffer."""
    parts: list[tuple[Any, int]]
    """Its contents at launch, see :func:`_parts`."""
    on_gpu: Mapping[str, Any]
    """Its copy on the GPU."""


_given: tuple[int, Callable[[], Any]] = 0, lambda: None
"""The ``id`` of the last batch that a buffer returned, and a weak reference to that buffer."""


def remember_buffer(next_batch: Callable[[Any], Any], buffered: Any) -> Any:
    """fairseq's ``BufferedIterator.__next__``; remembers the buffer, which also holds the next batch."""
    global _given
    batch = next_batch(buffered)
    _given = id(batch), weakref.ref(buffered)
    return batch


def use_begun(
    train_step: Callable[..., Any], trainer: Any, samples: Sequence[Any], *args: Any, **kwargs: Any
) -> Any:
    """fairseq's ``Trainer.train_step``; if the first batch's forward was launched, uses its GPU copy."""
    begun: Begun | None = vars(trainer).pop("begun", None)
    last, buffer = _given
    if samples and id(samples[-1]) == last:
        trainer.buffer_of_next = buffer
    if begun is not None and samples and samples[0] is begun.batch and _same(begun.parts, _parts(samples[0])):
        samples = [begun.on_gpu, *samples[1:]]
    try:
        return train_step(trainer, samples, *args, **kwargs)
    finally:
        vars(trainer).pop("buffer_of_next", None)  # still set after an update that overflowed


def begin_next(set_num_updates: Callable[..., Any], trainer: Any, num_updates: int) -> Any:
    """fairseq's ``Trainer.set_num_updates``, called after the optimizer step; launches the next forward."""
    buffered = vars(trainer).pop("buffer_of_next", lambda: None)()
    if buffered is not None and is_fairseqs_loop(trainer):
        try:
            _begin(trainer, buffered._queue.queue, seed_of_update(trainer, num_updates))
        except RuntimeError as error:
            if "out of memory" not in str(error):  # fairseq handles that when it reaches the batch
                raise
    return set_num_updates(trainer, num_updates)


def _begin(trainer: Any, waiting: Sequence[Any], seed: int) -> None:
    step_of = getattr(trainer.get_criterion(), "step_of", lambda model: None)
    step = step_of(trainer.model)
    if step is None or not waiting:
        return
    batch = waiting[0]
    if isinstance(batch, dict) and batch:  # not the end of the epoch, an error, or a dummy
        parts = _parts(batch)
        sample, _ = trainer._prepare_sample(batch)
        if step.begin(sample, seed):
            trainer.begun = Begun(batch, parts, sample)


def _parts(batch: Mapping[str, Any]) -> list[tuple[Any, int]]:
    """All values in a batch, each with the version counter of its tensor."""
    parts: list[tuple[Any, int]] = []
    for part in batch.values():
        parts += _parts(part) if isinstance(part, dict) else [(part, getattr(part, "_version", 0))]
    return parts


def _same(one: list[tuple[Any, int]], other: list[tuple[Any, int]]) -> bool:
    return len(one) == len(other) and all(
        a is b and version == now for (a, version), (b, now) in zip(one, other, strict=True)
    )
