"""Triton: bias, dropout, residual and LayerNorm in one pass over the rows, forward and backward.

``s = residual + dropout(x + x_bias)``, ``y = (s - mean) / std * weight + bias``, with x, residual, s and y of
N x C. Tested against torch's operations in ``add_norm.py``.

Gradients of vectors are sums over all rows: each program sums up the rows that it processes, and torch adds
the programs' sums.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

from surface_fusion.ops.dropout_triton import keep

PROGRAMS = 264
"""Maximum number of programs in backward: two for each multiprocessor of an H100."""


@triton.jit
def _add_norm_kernel(
    x_base: tl.tensor, x_bias: tl.tensor, residual_base: tl.tensor, weight: tl.tensor, bias: tl.tensor,
    s_base: tl.tensor, y_base: tl.tensor, mean_base: tl.tensor, rstd_base: tl.tensor, seed_base: tl.tensor,
    rate: tl.tensor, eps: tl.tensor, n: tl.tensor, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, DROPOUT: tl.constexpr,
) -> None:  # fmt: skip
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    cols = tl.arange(0, BLOCK_C)
    inside = cols < C
    mask = (rows < n)[:, None] & inside[None, :]
    at = rows.to(tl.int64)[:, None] * C + cols[None, :]
    x = tl.load(x_base + at, mask=mask, other=0.0).to(tl.float32)
    x += tl.load(x_bias + cols, mask=inside, other=0.0).to(tl.float32)[None, :]
    if DROPOUT:
        x = tl.where(keep(tl.load(seed_base), rows[:, None], cols[None, :], rate), x / (1 - rate), 0.0)
    s = x + tl.load(residual_base + at, mask=mask, other=0.0).to(tl.float32)
    s = s.to(s_base.dtype.element_ty).to(tl.float32)  # normalise the rounded sum, which is stored
    tl.store(s_base + at, s.to(s_base.dtype.element_ty), mask=mask)
    mean = tl.sum(s, 1) / C
    centred = tl.where(inside[None, :], s - mean[:, None], 0.0)
    rstd = 1 / tl.sqrt(tl.sum(centred * centred, 1) / C + eps)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    b = tl.load(bias + cols, mask=inside, other=0.0).to(tl.float32)
    y = centred * rstd[:, None] * w[None, :] + b[None, :]
    tl.store(y_base + at, y.to(y_base.dtype.element_ty), mask=mask)
    tl.store(mean_base + rows, mean, mask=rows < n)
    tl.store(rstd_base + rows, rstd, mask=rows < n)


@triton.jit
def _add_norm_backward_kernel(
    dy_base: tl.tensor, ds_base: tl.tensor, s_base: tl.tensor, weight: tl.tensor, mean_base: tl.tensor,
    rstd_base: tl.tensor, seed_base: tl.tensor, rate: tl.tensor, n: tl.tensor, dx_base: tl.tensor,
    dresidual_base: tl.tensor, sums_base: tl.tensor, C: tl.constexpr, BLOCK_C: tl.constexpr,
    ROWS: tl.constexpr, DROPOUT: tl.constexpr, FROM_Y: tl.constexpr, FROM_S: tl.constexpr,
) -> None:  # fmt: skip
    cols = tl.arange(0, BLOCK_C)
    inside = cols < C
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32)
    d_weight = tl.zeros((BLOCK_C,), tl.float32)
    d_bias = tl.zeros((BLOCK_C,), tl.float32)
    d_x_bias = tl.zeros((BLOCK_C,), tl.float32)
    first = tl.program_id(0) * ROWS
    while first < n:
        rows = first + tl.arange(0, ROWS)
        mask = (rows < n)[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None] * C + cols[None, :]
        ds = tl.zeros((ROWS, BLOCK_C), tl.float32)
        if FROM_Y:
            dy = tl.load(dy_base + at, mask=mask, other=0.0).to(tl.float32)
            s = tl.load(s_base + at, mask=mask, other=0.0).to(tl.float32)
            mean = tl.load(mean_base + rows, mask=rows < n, other=0.0)
            rstd = tl.load(rstd_base + rows, mask=rows < n, other=0.0)
            normed = tl.where(inside[None, :], (s - mean[:, None]) * rstd[:, None], 0.0)
            d_weight += tl.sum(dy * normed, 0)
            d_bias += tl.sum(dy, 0)
            dn = dy * w[None, :]
            along = tl.sum(dn * normed, 1) / C
            ds = (dn - normed * along[:, None] - (tl.sum(dn, 1) / C)[:, None]) * rstd[:, None]
        if FROM_S:
            ds += tl.load(ds_base + at, mask=mask, other=0.0).to(tl.float32)
        tl.store(dresidual_base + at, ds.to(dresidual_base.dtype.element_ty), mask=mask)
        dx = tl.where(inside[None, :], ds, 0.0)
        if DROPOUT:
            dx = tl.where(keep(tl.load(seed_base), rows[:, None], cols[None, :], rate), dx / (1 - rate), 0.0)
            tl.store(dx_base + at, dx.to(dx_base.dtype.element_ty), mask=mask)
        d_x_bias += tl.sum(dx, 0)
        first += tl.num_programs(0) * ROWS
    sums = sums_base + tl.program_id(0) * 3 * C + cols
    tl.store(sums, d_weight, mask=inside)
    tl.store(sums + C, d_bias, mask=inside)
    tl.store(sums + 2 * C, d_x_bias, mask=inside)


def _shape(dim: int) -> dict[str, int]:
    """A block of about 4,096 elements."""
    block = triton.next_power_of_2(dim)
    return {"C": dim, "BLOCK_C": block, "ROWS": max(4096 // block, 1), "num_warps": 8 if block > 2048 else 4}


def add_norm_forward(
    x: Tensor,
    x_bias: Tensor,
    residual: Tensor,
    weight: Tensor,
    bias: Tensor,
    rate: float,
    eps: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """s, y, and each row's mean and 1/std, see the module's head."""
    n, dim = x.shape
    s, y = torch.empty_like(x), torch.empty_like(x)
    mean, rstd = torch.empty((2, n), dtype=torch.float32, device=x.device).unbind()
    shape = _shape(dim)
    _add_norm_kernel[(triton.cdiv(n, shape["ROWS"]),)](
        x, x_bias, residual, weight, bias, s, y, mean, rstd, seed if rate > 0 else mean, rate, eps, n,
        **shape, DROPOUT=rate > 0,
    )  # fmt: skip
    return s, y, mean, rstd


def add_norm_backward(
    dy: Tensor | None,
    ds: Tensor | None,
    saved: tuple[Tensor, Tensor, Tensor, Tensor],
    rate: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of x and of the residual, and the 3 x C of weight, bias and x's bias, in float32.

    *saved* is (s, weight, mean, rstd); *dy* and *ds* may be missing, not both.
    """
    s, weight, mean, rstd = saved
    n, dim = s.shape
    d_residual = torch.empty_like(s)
    d_x = torch.empty_like(s) if rate > 0 else d_residual
    shape = _shape(dim)
    programs = min(PROGRAMS, triton.cdiv(n, shape["ROWS"]))
    sums = torch.empty((programs, 3, dim), dtype=torch.float32, device=s.device)
    _add_norm_backward_kernel[(programs,)](
        s if dy is None else dy, s if ds is None else ds, s, weight, mean, rstd, seed if rate > 0 else mean,
        rate, n, d_x, d_residual, sums,
        **shape, DROPOUT=rate > 0, FROM_Y=dy is not None, FROM_S=ds is not None,
    )  # fmt: skip
    return d_x, d_residual, sums.sum(0)
