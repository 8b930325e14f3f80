"""The end of a sublayer: bias, dropout, residual and LayerNorm in one pass.

``s = residual + dropout(x W^T + b)``, ``y = LayerNorm(s)``, with x of N x D, and residual, s and y of N x C.

On a GPU a kernel of ``add_norm_triton.py`` follows the product. It is tested against torch's operations, and
these, which are used on a CPU, against the formula.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.ops.backend import use_kernels
from surface_fusion.ops.dropout import dropout

WIDEST_ROW = 8192
"""Maximum row width; a kernel holds a complete row."""


def project_add_norm(
    x: Tensor,
    projection: tuple[Tensor, Tensor],
    residual: Tensor,
    norm: tuple[Tensor, Tensor, float],
    rate: float = 0.0,
    seed: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """Return ``s = residual + dropout(x W^T + b)`` and ``y = LayerNorm(s)``, N x C each.

    Args:
        x: N x D.
        projection: W and b, C x D and C.
        residual: N x C.
        norm: LayerNorm's weight, bias and epsilon.
        rate: dropout probability.
        seed: seed of the kernel's dropout, an int32 scalar on the GPU; on a CPU torch's generator is used.
    """
    weight, bias, eps = norm
    if use_kernels(x) and residual.shape[-1] <= WIDEST_ROW:
        x = F.linear(x, projection[0])
        return _AddNorm.apply(x, projection[1], residual.contiguous(), weight, bias, rate, eps, seed)
    s = residual + dropout(F.linear(x, *projection), rate)
    return s, F.layer_norm(s, weight.shape, weight, bias, eps)


class _AddNorm(torch.autograd.Function):
    """:func:`project_add_norm` after the product, by the kernels."""

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
        ctx.options = rate, seed
        ctx.set_materialize_grads(False)
        return s, y

    @staticmethod
    def backward(ctx: Any, ds: Tensor | None, dy: Tensor | None) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from surface_fusion.ops.add_norm_triton import add_norm_backward

        if ds is None and dy is None:
            return (None,) * 8
        ds, dy = (g if g is None else g.contiguous() for g in (ds, dy))
        d_x, d_residual, sums = add_norm_backward(dy, ds, ctx.saved_tensors, *ctx.options)
        d_weight, d_bias, d_x_bias = sums.to(d_x.dtype).unbind()
        return d_x, d_x_bias, d_residual, d_weight, d_bias, None, None, None
