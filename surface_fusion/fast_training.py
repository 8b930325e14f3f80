"""Which trainings the trainer's fast code acts on: those of a model of ours without ``--sf-plain``.

``Trainer.__init__`` decides it once, from the model. The decision is the attribute ``fast_training`` of the
trainer, of its task, of the iterators that the task makes for it, and of their buffers. Everything else
(another model, a task or an iterator without a trainer) is left to fairseq's own methods.
"""

from collections.abc import Callable
from typing import Any

from fairseq.data.iterators import BufferedIterator

from surface_fusion import while_waiting
from surface_fusion.compat.patching import wrap
from surface_fusion.config import SurfaceFusionConfig
from surface_fusion.fast.eligibility import unwrapped


def trains_fast(model: Any) -> bool:
    """Whether *model*, which may be inside distributed wrappers, is ours and not ``--sf-plain``."""
    cfg = getattr(getattr(unwrapped(model), "decoder", None), "cfg", None)
    return isinstance(cfg, SurfaceFusionConfig) and not cfg.sf_plain


def wrap_if_fast(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """:func:`wrap` the method or property ``owner.name``, for objects whose ``fast_training`` is true."""

    def guarded(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "fast_training", False):
            return wrapper(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    wrap(owner, name, guarded)


def decide(
    init: Callable[..., None], trainer: Any, cfg: Any, task: Any, model: Any, *args: Any, **kwargs: Any
) -> None:
    """fairseq's ``Trainer.__init__``; before it, the trainer and its task get their ``fast_training``."""
    while_waiting.forget()
    trainer.fast_training = trains_fast(model)
    if task is not None:
        task.fast_training = trainer.fast_training
    init(trainer, cfg, task, model, *args, **kwargs)


def mark_iterator(get_batch_iterator: Callable[..., Any], task: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``FairseqTask.get_batch_iterator`` of a fast training: its iterator belongs to that."""
    iterator = get_batch_iterator(task, *args, **kwargs)
    iterator.fast_training = True
    return iterator


def mark_buffer(get_iterator: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``EpochBatchIterator._get_iterator_for_epoch`` of a fast training, and its buffer."""
    counting = get_iterator(iterator, *args, **kwargs)
    buffered = getattr(counting, "_itr", None)
    if isinstance(buffered, BufferedIterator):
        buffered.fast_training = True  # type: ignore[attr-defined]
    return counting
