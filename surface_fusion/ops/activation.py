"""Linear map, activation and dropout as one operation: ``dropout(activation(x W^T + b))``, N x D to N x C.

On a GPU with ReLU the backward is a kernel of ``activation_triton.py``. It is tested against torch's
operations, which are used otherwise.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.ops.backend import use_kernels
from surface_fusion.ops.dropout import dropout


def project_activate(
    x: Tensor, weight: Tensor, bias: Tensor, activation: Callable[[Tensor], Tensor], rate: float = 0.0
) -> Tensor:
    """Compute ``dropout(activation(x W^T + b))``: x is N x D, *weight* C x D, *bias* C, the result N x C."""
    if use_kernels(x) and activation in (F.relu, torch.relu):
        return _ProjectRelu.apply(x, weight, bias, rate)
    return dropout(activation(F.linear(x, weight, bias)), rate)


class _ProjectRelu(torch.autograd.Function):
    """:func:`project_activate` for ReLU, by torch's fused product and the kernel for the backward.

    Backward needs no mask: an element that was dropped is zero in the result, as one that was negative.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor, rate: float) -> Tensor:
        h = torch._addmm_activation(bias, x, weight.t())
        if rate > 0:
            h = torch.native_dropout(h, rate, True)[0]
        ctx.save_for_backward(x, weight, h)
        ctx.scale = 1 / (1 - rate)
        return h

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from surface_fusion.ops.activation_triton import relu_backward

        x, weight, h = ctx.saved_tensors
        du, d_bias = relu_backward(grad.contiguous(), h, ctx.scale)
        return du @ weight, du.t() @ x, d_bias.to(du.dtype), None
