"""The elementwise operations around the matrix products of a Transformer layer, fused into few passes.

On a GPU they use the kernels of ``elementwise_kernels.py``; on a CPU, and as the reference in tests, torch's
operations. Rows are N x C. *seed*, an int32 scalar on the GPU, is the seed of the kernels' dropout.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.ops.backend import use_kernels

WIDEST_ROW = 8192
"""Maximum row width; a kernel holds a complete row."""


def drop(x: Tensor, rate: float) -> Tensor:
    """Dropout in training.

    On a CPU torch draws a double per element, which takes as long as a matrix product. This draws 16 bits, so
    the rate is exact to 1/65,536.
    """
    if rate <= 0:
        return x
    if x.is_cuda or rate >= 1:
        return F.dropout(x, rate)
    draws = torch.empty(math.ceil(x.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
    return x * (bits >= round(rate * 2**16) - 2**15).to(x.dtype).mul_(1 / (1 - rate))


def project_add_norm(
    x: Tensor,
    projection: tuple[Tensor, Tensor],
    residual: Tensor,
    norm: tuple[Tensor, Tensor, float],
    rate: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """``s = residual + dropout(x W^T + b)`` and ``LayerNorm(s)``, the end of each sublayer.

    Args:
        x: N x D.
        projection: W and b, C x D and C.
        residual: N x C.
        norm: LayerNorm's weight, bias and epsilon.
    """
    weight, bias, eps = norm
    if use_kernels(x) and residual.shape[-1] <= WIDEST_ROW:
        x = F.linear(x, projection[0])
        return _AddNorm.apply(x, projection[1], residual.contiguous(), weight, bias, rate, eps, seed)
    s = residual + drop(F.linear(x, *projection), rate)
    return s, F.layer_norm(s, weight.shape, weight, bias, eps)


def project_activate(
    x: Tensor, weight: Tensor, bias: Tensor, activation: Callable[[Tensor], Tensor], rate: float = 0.0
) -> Tensor:
    """``dropout(activation(x W^T + b))``: the hidden layer of a feed-forward."""
    if use_kernels(x) and activation in (F.relu, torch.relu):
        return _ProjectRelu.apply(x, weight, bias, rate)
    return drop(activation(F.linear(x, weight, bias)), rate)


class _AddNorm(torch.autograd.Function):
    """:func:`project_add_norm` after the product."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        x_bias: Tensor,
        residual: Tensor,
        weight: Tensor,
        bias: Tensor,
        rate: float,
        eps: float,
        seed: Tensor | None,
    ) -> tuple[Tensor, Tensor]:
        from surface_fusion.ops.add_norm_triton import add_norm_forward

        s, y, mean, rstd = add_norm_forward(x, x_bias, residual, weight, bias, rate, eps, seed)
        ctx.save_for_backward(s, weight, mean, rstd)
        ctx.how = rate, seed
        ctx.set_materialize_grads(False)
        return s, y

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from surface_fusion.ops.add_norm_triton import add_norm_backward

        if ds is None and dy is None:
            return (None,) * 8
        ds, dy = (g if g is None else g.contiguous() for g in (ds, dy))
        d_x, d_residual, sums = add_norm_backward(dy, ds, ctx.saved_tensors, *ctx.how)
        d_weight, d_bias, d_x_bias = sums.to(d_x.dtype).unbind()
        return d_x, d_x_bias, d_residual, d_weight, d_bias, None, None, None


class _ProjectRelu(torch.autograd.Function):
    """:func:`project_activate` for ReLU. What was dropped is zero, as what was negative."""

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
        from surface_fusion.ops.add_norm_triton import relu_backward

        x, weight, h = ctx.saved_tensors
        du, d_bias = relu_backward(grad.contiguous(), h, ctx.scale)
        return du @ weight, du.t() @ x, d_bias.to(du.dtype), None
