"""Adam with decoupled weight decay as in fairseq's ``adam``: a plain version and torch's fused kernel.

w <- (1 - lr decay) w - lr sqrt(1 - beta2^t) / (1 - beta1^t) m / (sqrt(v) + eps)

with m <- beta1 m + (1 - beta1) g, v <- beta2 v + (1 - beta2) g^2 (Kingma & Ba, 2015, in the order of the end
of their section 2, whose epsilon is not bias-corrected; decay as in Loshchilov & Hutter, 2019). Tensors are
1-D, of one shape; weights and moments are changed in place.
"""

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor


class AdamOptions(NamedTuple):
    """Hyperparameters of an update."""

    lr: float
    betas: tuple[float, float]
    eps: float
    weight_decay: float


def plain_adam(
    weights: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, steps: int, options: AdamOptions
) -> None:
    """Compute update number *steps* (t in the formula, >= 1) by the formula."""
    lr, (beta1, beta2), eps, weight_decay = options
    exp_avg.mul_(beta1).add_(grad, alpha=1 - beta1)
    exp_avg_sq.mul_(beta2).addcmul_(grad, grad, value=1 - beta2)
    weights.mul_(1 - lr * weight_decay)
    step_size = lr * math.sqrt(1 - beta2**steps) / (1 - beta1**steps)
    weights.addcdiv_(exp_avg, exp_avg_sq.sqrt().add_(eps), value=-step_size)


def fused_adam(
    weights: Tensor, grad: Tensor, exp_avg: Tensor, exp_avg_sq: Tensor, steps: int, options: AdamOptions
) -> None:
    """Same as :func:`plain_adam`, by torch's fused kernel; tested against it.

    The kernel divides by sqrt(v / (1 - beta2^t)) + eps; an epsilon of eps / sqrt(1 - beta2^t) gives the same.
    """
    lr, (beta1, beta2), eps, weight_decay = options
    state_step = torch.full((), float(steps), dtype=torch.float32, device=weights.device)
    eps /= math.sqrt(1 - beta2**steps)
    tensors = [[weights], [grad], [exp_avg], [exp_avg_sq], [], [state_step]]
    settings: dict[str, Any] = {"lr": lr, "beta1": beta1, "beta2": beta2, "eps": eps}
    settings |= {"weight_decay": weight_decay, "amsgrad": False, "maximize": False}
    torch._fused_adamw_(*tensors, **settings)  # type: ignore[call-overload]
    torch.autograd.graph.increment_version(weights)  # the kernel does not do it
