"""The optimizer's step, launched before the host knows the gradient's norm.

When the norm had come to the host, it woke, clipped, looked whether the norm was finite and went through
fairseq's wrappers; for 0.4 ms of each update, 0.6 with two GPUs, these waited (H200). But a GPU has the norm
itself, can clip by it, and leave all as it is where the norm is not finite, which is what the host decides.
"""

from collections.abc import Callable
from typing import Any

from fairseq.optim import MemoryEfficientFP16Optimizer
from fairseq.tasks import FairseqTask
from torch import Tensor


def begin_step(clip_grad_norm: Callable[..., Tensor], trainer: Any, clip_norm: float) -> Tensor:
    """fairseq's ``Trainer.clip_grad_norm``; what follows is the step, unless the norm is not finite."""
    optimizer, factor, margin = trainer.optimizer, 1.0, 1e-6
    if isinstance(optimizer, MemoryEfficientFP16Optimizer):
        factor = optimizer._multiply_factor
        margin = 0.0 if optimizer.scaler is not None else margin  # fairseq clips bf16 as torch does, fp16 not
        optimizer = optimizer.wrapped_optimizer
    begin = getattr(optimizer, "begin_step", None)
    steps_next = type(trainer.task).optimizer_step is FairseqTask.optimizer_step
    if begin is not None and steps_next and not trainer.is_fsdp:
        begin(factor, clip_norm, margin)
    return clip_grad_norm(trainer, clip_norm)
