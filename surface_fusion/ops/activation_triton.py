"""Triton: backward of bias, ReLU and dropout in one pass over the rows.

``du = dh / (1 - rate)`` where ``h = dropout(relu(u + bias)) > 0`` and else 0, and the sum of du over the
rows, the bias' gradient; h, dh and du are N x C. Tested against torch's operations in ``activation.py``.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

PROGRAMS = 132
"""Maximum number of programs per block of columns: one for each multiprocessor of an H100."""


@triton.jit
def _relu_backward_kernel(
    grad_base: tl.tensor, h_base: tl.tensor, scale: tl.tensor, n: tl.tensor, du_base: tl.tensor,
    sums_base: tl.tensor, C: tl.constexpr, BLOCK_C: tl.constexpr, ROWS: tl.constexpr,
) -> None:  # fmt: skip
    cols = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = cols < C
    total = tl.zeros((BLOCK_C,), tl.float32)
    first = tl.program_id(0) * ROWS
    while first < n:
        rows = first + tl.arange(0, ROWS)
        mask = (rows < n)[:, None] & inside[None, :]
        at = rows.to(tl.int64)[:, None] * C + cols[None, :]
        h = tl.load(h_base + at, mask=mask, other=0.0)
        du = tl.load(grad_base + at, mask=mask, other=0.0).to(tl.float32) * scale
        du = tl.where(h > 0, du, 0.0)
        tl.store(du_base + at, du.to(du_base.dtype.element_ty), mask=mask)
        total += tl.sum(du, 0)
        first += tl.num_programs(0) * ROWS
    tl.store(sums_base + tl.program_id(0) * C + cols, total, mask=inside)


def relu_backward(grad: Tensor, h: Tensor, scale: float) -> tuple[Tensor, Tensor]:
    """Return du and its sum over the rows, C in float32, from dh, h and *scale*, ``1 / (1 - rate)``."""
    n, dim = h.shape
    du = torch.empty_like(grad)
    block, rows = min(triton.next_power_of_2(dim), 512), 8
    programs = min(PROGRAMS, triton.cdiv(n, rows))
    sums = torch.empty((programs, dim), dtype=torch.float32, device=h.device)
    _relu_backward_kernel[(programs, triton.cdiv(dim, block))](
        grad, h, scale, n, du, sums, C=dim, BLOCK_C=block, ROWS=rows, num_warps=4
    )
    return du, sums.sum(0)
