"""Decide whether a Trainer uses the fast path: SurfaceFusion models without ``--sf-plain``.

``Trainer.__init__`` decides once, from the model. The decision is stored as the attribute ``fast_training``
of the trainer, its task, the iterators that the task builds, and their buffers. All other objects (another
model, a task or iterator without a trainer) use fairseq's own methods.
"""

from collections.abc import Callable
from typing import Any

from fairseq.data.iterators import BufferedIterator

from surface_fusion.compat.patching import wrap
from surface_fusion.config.model import SurfaceFusionConfig
from surface_fusion.packed.eligibility import unwrapped


def trains_fast(model: Any) -> bool:
    """Whether *model*, possibly in distributed wrappers, is a SurfaceFusion model without ``--sf-plain``."""
    cfg = getattr(getattr(unwrapped(model), "decoder", None), "cfg", None)
    return isinstance(cfg, SurfaceFusionConfig) and not cfg.sf_plain


def wrap_if_fast(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """:func:`wrap` the method or property ``owner.name`` for objects whose ``fast_training`` is true."""

    def guarded(original: Callable[..., Any], self: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(self, "fast_training", False):
            return wrapper(original, self, *args, **kwargs)
        return original(self, *args, **kwargs)

    wrap(owner, name, guarded)


def decide(
    init: Callable[..., None], trainer: Any, cfg: Any, task: Any, model: Any, *args: Any, **kwargs: Any
) -> None:
    """fairseq's ``Trainer.__init__``; first sets ``fast_training`` of the trainer and its task."""
    trainer.fast_training = trains_fast(model)
    if task is not None:
        task.fast_training = trainer.fast_training
    init(trainer, cfg, task, model, *args, **kwargs)


def mark_iterator(get_batch_iterator: Callable[..., Any], task: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``FairseqTask.get_batch_iterator``; sets ``fast_training`` of the iterator."""
    iterator = get_batch_iterator(task, *args, **kwargs)
    iterator.fast_training = True
    return iterator


def mark_buffer(get_iterator: Callable[..., Any], iterator: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``EpochBatchIterator._get_iterator_for_epoch``; sets ``fast_training`` of its buffer."""
    counting = get_iterator(iterator, *args, **kwargs)
    buffered = getattr(counting, "_itr", None)
    if isinstance(buffered, BufferedIterator):
        buffered.fast_training = True  # type: ignore[attr-defined]
    return counting
