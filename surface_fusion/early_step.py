"""The optimizer's step, launched before the host knows the gradient's norm.

When the norm had come to the host, it woke, clipped, looked whether the norm was finite and went through
fairseq's wrappers; for 0.4 ms of each update, 0.6 with two GPUs, these waited (H200). But a GPU has the norm
itself, can clip by it, and learn nothing where the norm is not finite, which is what the host decides. Only
in fairseq's own loop, where the step follows whenever the norm is finite.
"""

from collections.abc import Callable
from typing import Any

from fairseq.optim import MemoryEfficientFP16Optimizer
from torch import Tensor

from surface_fusion.quick_trainer import is_fairseqs_loop


def expect_step(train_step: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``Trainer.train_step``, in which one step follows one :func:`begin_step`."""
    trainer.step_follows = is_fairseqs_loop(trainer)
    try:
        return train_step(trainer, *args, **kwargs)
    finally:
        trainer.step_follows = False


def begin_step(clip_grad_norm: Callable[..., Tensor], trainer: Any, clip_norm: float) -> Tensor:
    """fairseq's ``Trainer.clip_grad_norm``."""
    optimizer, factor, margin = trainer.optimizer, 1.0, 1e-6
    if isinstance(optimizer, MemoryEfficientFP16Optimizer):
        factor = optimizer._multiply_factor
        margin = 0.0 if optimizer.scaler is not None else margin  # fairseq clips bf16 as torch does, fp16 not
        optimizer = optimizer.wrapped_optimizer
    begin = getattr(optimizer, "begin_step", None)
    follows = vars(trainer).pop("step_follows", False) and "step" not in vars(trainer.optimizer)
    if begin is not None and follows:
        begin(factor, clip_norm, margin)
    return clip_grad_norm(trainer, clip_norm)
