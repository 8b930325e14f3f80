"""Triton: attention over packed rows, forward and backward; operation and shapes: ``packed_attention.py``.

The last axis is contiguous. Tested against :func:`surface_fusion.ops.packed_attention.attend_padded`.

A block of query rows covers a few neighbouring sentences, whose keys are neighbours as well. The block reads
the keys from the start of its first sentence to the end of its last, and masks keys of other sentences by
comparing sentence numbers. Sentences in translation are shorter than a block, so kernels that start a block
per sentence (FlashAttention with sequence boundaries) leave most of each block unused. The softmax is
computed online, as in FlashAttention (Dao et al., 2022, https://arxiv.org/abs/2205.14135); backward
recomputes it from the saved log-sum-exp.
"""

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from surface_fusion.ops.dropout_triton import keep
from surface_fusion.ops.packed_rows import PackedRows

UNLIMITED = 2**30
"""Number of later rows that a non-causal query may attend to; lets one kernel serve both cases."""

LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _scores(
    q: tl.tensor, k: tl.tensor, q_rows: tl.tensor, k_rows: tl.tensor, q_sentence: tl.tensor,
    k_sentence: tl.tensor, scale: tl.tensor, reach: tl.tensor, PRECISION: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    """Scores in units of log2, -inf where a query may not attend."""
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION) * (scale * LOG2E)
    seen = q_sentence[:, None] == k_sentence[None, :]
    seen &= q_rows[:, None] + reach >= k_rows[None, :]
    return tl.where(seen, s, float("-inf"))


@triton.jit
def _load(
    base: tl.tensor, rows: tl.tensor, limit: tl.tensor, stride: tl.tensor, d: tl.tensor, D: tl.constexpr,
) -> tl.tensor:  # fmt: skip
    mask = (rows < limit)[:, None] & (d < D)[None, :]
    return tl.load(base + rows.to(tl.int64)[:, None] * stride + d[None, :], mask=mask, other=0.0)


@triton.jit
def _store(
    base: tl.tensor, x: tl.tensor, rows: tl.tensor, limit: tl.tensor, stride: tl.tensor, d: tl.tensor,
    D: tl.constexpr,
) -> None:  # fmt: skip
    mask = (rows < limit)[:, None] & (d < D)[None, :]
    tl.store(base + rows.to(tl.int64)[:, None] * stride + d[None, :], x.to(base.dtype.element_ty), mask=mask)


@triton.jit
def _range(
    sentences: tl.tensor, starts: tl.tensor, first: tl.tensor, last: tl.tensor,
) -> tuple[tl.tensor, tl.tensor]:  # fmt: skip
    """The range of rows on the other side that belongs to the sentences of rows *first* to *last*."""
    begin = tl.load(starts + tl.load(sentences + first))
    end = tl.load(starts + tl.load(sentences + last) + 1)
    return begin, end


@triton.jit
def _forward_kernel(
    q_base: tl.tensor, k_base: tl.tensor, v_base: tl.tensor, o_base: tl.tensor, lse_base: tl.tensor,
    q_sentences: tl.tensor, k_sentences: tl.tensor, k_starts: tl.tensor, seed_base: tl.tensor,
    scale: tl.tensor, rate: tl.tensor, reach: tl.tensor, n: tl.tensor, q_row: tl.tensor,
    q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor, v_row: tl.tensor, v_head: tl.tensor,
    o_row: tl.tensor, o_head: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    first = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_Q)
    q = _load(q_base + head * q_head, rows, n, q_row, d, D)
    q_sentence = tl.load(q_sentences + rows, mask=rows < n, other=-1)
    begin, end = _range(q_sentences, k_starts, first, tl.minimum(first + BLOCK_Q, n) - 1)
    end = tl.minimum(end, first + BLOCK_Q + reach)
    if DROPOUT:
        seed = tl.load(seed_base) + head * 0x632BE59B
        k_start = tl.load(k_starts + q_sentence, mask=rows < n, other=0)
    peak = tl.full((BLOCK_Q,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_Q,), tl.float32)
    acc = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    start = begin
    while start < end:
        cols = start + tl.arange(0, BLOCK_K)
        k_sentence = tl.load(k_sentences + cols, mask=cols < end, other=-2)
        k = _load(k_base + head * k_head, cols, end, k_row, d, D)
        s = _scores(q, k, rows, cols, q_sentence, k_sentence, scale, reach, PRECISION)
        new = tl.maximum(peak, tl.max(s, 1))
        safe = tl.where(new == float("-inf"), 0.0, new)
        old = tl.exp2(peak - safe)
        p = tl.exp2(s - safe[:, None])
        total = total * old + tl.sum(p, 1)
        if DROPOUT:
            kept = keep(seed, rows[:, None], cols[None, :] - k_start[:, None], rate)
            p = tl.where(kept, p / (1 - rate), 0.0)
        v = _load(v_base + head * v_head, cols, end, v_row, d, D)
        acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision=PRECISION)
        peak = new
        start += BLOCK_K
    _store(o_base + head * o_head, acc / total[:, None], rows, n, o_row, d, D)
    tl.store(lse_base + head * n + rows, peak + tl.log2(total), mask=rows < n)


@triton.jit
def _query_kernel(
    q_base: tl.tensor, k_base: tl.tensor, v_base: tl.tensor, o_base: tl.tensor, lse_base: tl.tensor,
    do_base: tl.tensor, dq_base: tl.tensor, delta_base: tl.tensor, q_sentences: tl.tensor,
    k_sentences: tl.tensor, k_starts: tl.tensor, seed_base: tl.tensor, scale: tl.tensor, rate: tl.tensor,
    reach: tl.tensor, n: tl.tensor, q_row: tl.tensor, q_head: tl.tensor, k_row: tl.tensor,
    k_head: tl.tensor, v_row: tl.tensor, v_head: tl.tensor, o_row: tl.tensor, o_head: tl.tensor,
    do_row: tl.tensor, do_head: tl.tensor, dq_row: tl.tensor, dq_head: tl.tensor, D: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr, BLOCK_K: tl.constexpr, DROPOUT: tl.constexpr,
    PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Gradient of the queries, and delta, the inner product of each output and its gradient."""
    first = tl.program_id(0) * BLOCK_Q
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    rows = first + tl.arange(0, BLOCK_Q)
    q = _load(q_base + head * q_head, rows, n, q_row, d, D)
    do = _load(do_base + head * do_head, rows, n, do_row, d, D)
    o = _load(o_base + head * o_head, rows, n, o_row, d, D)
    delta = tl.sum(do.to(tl.float32) * o.to(tl.float32), 1)
    tl.store(delta_base + head * n + rows, delta, mask=rows < n)
    lse = tl.load(lse_base + head * n + rows, mask=rows < n, other=0.0)
    q_sentence = tl.load(q_sentences + rows, mask=rows < n, other=-1)
    begin, end = _range(q_sentences, k_starts, first, tl.minimum(first + BLOCK_Q, n) - 1)
    end = tl.minimum(end, first + BLOCK_Q + reach)
    if DROPOUT:
        seed = tl.load(seed_base) + head * 0x632BE59B
        k_start = tl.load(k_starts + q_sentence, mask=rows < n, other=0)
    dq = tl.zeros((BLOCK_Q, BLOCK_D), tl.float32)
    start = begin
    while start < end:
        cols = start + tl.arange(0, BLOCK_K)
        k_sentence = tl.load(k_sentences + cols, mask=cols < end, other=-2)
        k = _load(k_base + head * k_head, cols, end, k_row, d, D)
        s = _scores(q, k, rows, cols, q_sentence, k_sentence, scale, reach, PRECISION)
        p = tl.exp2(s - lse[:, None])
        v = _load(v_base + head * v_head, cols, end, v_row, d, D)
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        if DROPOUT:
            kept = keep(seed, rows[:, None], cols[None, :] - k_start[:, None], rate)
            dp = tl.where(kept, dp / (1 - rate), 0.0)
        ds = p * (dp - delta[:, None])
        dq += tl.dot(ds.to(k.dtype), k, input_precision=PRECISION)
        start += BLOCK_K
    _store(dq_base + head * dq_head, dq * scale, rows, n, dq_row, d, D)


@triton.jit
def _key_kernel(
    q_base: tl.tensor, k_base: tl.tensor, v_base: tl.tensor, lse_base: tl.tensor, do_base: tl.tensor,
    delta_base: tl.tensor, dk_base: tl.tensor, dv_base: tl.tensor, q_sentences: tl.tensor,
    k_sentences: tl.tensor, q_starts: tl.tensor, k_starts: tl.tensor, seed_base: tl.tensor,
    scale: tl.tensor, rate: tl.tensor, reach: tl.tensor, n: tl.tensor, m: tl.tensor, q_row: tl.tensor,
    q_head: tl.tensor, k_row: tl.tensor, k_head: tl.tensor, v_row: tl.tensor, v_head: tl.tensor,
    do_row: tl.tensor, do_head: tl.tensor, dk_row: tl.tensor, dk_head: tl.tensor, dv_row: tl.tensor,
    dv_head: tl.tensor, D: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_Q: tl.constexpr,
    BLOCK_K: tl.constexpr, DROPOUT: tl.constexpr, PRECISION: tl.constexpr,
) -> None:  # fmt: skip
    """Gradients of keys and values."""
    first = tl.program_id(0) * BLOCK_K
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_D)
    cols = first + tl.arange(0, BLOCK_K)
    k = _load(k_base + head * k_head, cols, m, k_row, d, D)
    v = _load(v_base + head * v_head, cols, m, v_row, d, D)
    k_sentence = tl.load(k_sentences + cols, mask=cols < m, other=-2)
    begin, end = _range(k_sentences, q_starts, first, tl.minimum(first + BLOCK_K, m) - 1)
    begin = tl.maximum(begin, first - reach)
    if DROPOUT:
        seed = tl.load(seed_base) + head * 0x632BE59B
    dk = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    dv = tl.zeros((BLOCK_K, BLOCK_D), tl.float32)
    start = begin
    while start < end:
        rows = start + tl.arange(0, BLOCK_Q)
        q_sentence = tl.load(q_sentences + rows, mask=rows < end, other=-1)
        q = _load(q_base + head * q_head, rows, end, q_row, d, D)
        do = _load(do_base + head * do_head, rows, end, do_row, d, D)
        lse = tl.load(lse_base + head * n + rows, mask=rows < end, other=0.0)
        delta = tl.load(delta_base + head * n + rows, mask=rows < end, other=0.0)
        s = _scores(q, k, rows, cols, q_sentence, k_sentence, scale, reach, PRECISION)
        p = tl.exp2(s - lse[:, None])
        dp = tl.dot(do, tl.trans(v), input_precision=PRECISION)
        dropped = p
        if DROPOUT:
            k_start = tl.load(k_starts + q_sentence, mask=rows < end, other=0)
            kept = keep(seed, rows[:, None], cols[None, :] - k_start[:, None], rate)
            dropped = tl.where(kept, p / (1 - rate), 0.0)
            dp = tl.where(kept, dp / (1 - rate), 0.0)
        dv += tl.dot(tl.trans(dropped.to(do.dtype)), do, input_precision=PRECISION)
        ds = p * (dp - delta[:, None])
        dk += tl.dot(tl.trans(ds.to(q.dtype)), q, input_precision=PRECISION)
        start += BLOCK_Q
    _store(dk_base + head * dk_head, dk * scale, cols, m, dk_row, d, D)
    _store(dv_base + head * dv_head, dv, cols, m, dv_row, d, D)


def _constants(q: Tensor, rate: float) -> dict[str, Any]:
    dim = q.shape[-1]
    block_d = max(triton.next_power_of_2(dim), 16)
    # A block must fit into 227 KiB of shared memory and 64 K registers.
    block = 64 if block_d <= 128 else 32 if block_d <= 512 else 16
    if q.dtype == torch.float32 and block_d > 64:
        block = 32 if block_d <= 128 else 16
    return {
        "D": dim,
        "BLOCK_D": block_d,
        "BLOCK_Q": block,
        "BLOCK_K": block,
        "DROPOUT": rate > 0,
        "PRECISION": "tf32x3",  # float32 as three products on tensor cores; ignored for other dtypes
        "num_warps": 4 if block_d <= 128 else 8,
        "num_stages": 2 if block_d <= 128 else 1,
    }


def attention_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: PackedRows,
    keys: PackedRows,
    causal: bool,
    rate: float,
    seed: Tensor | None,
) -> tuple[Tensor, Tensor]:
    """Return the output, N x H x D, and the log2-sum-exp of the scores, H x N.

    The arguments are those of :func:`surface_fusion.ops.packed_attention.attend`.
    """
    n, heads, dim = q.shape
    out = torch.empty((n, heads, dim), dtype=q.dtype, device=q.device)
    lse = torch.empty((heads, n), dtype=torch.float32, device=q.device)
    constants = _constants(q, rate)
    strides = [s for x in (q, k, v, out) for s in x.stride()[:2]]
    grid = (triton.cdiv(n, constants["BLOCK_Q"]), heads)
    _forward_kernel[grid](
        q, k, v, out, lse, queries.sentence, keys.sentence, keys.starts, seed if rate > 0 else lse,
        dim**-0.5, rate, 0 if causal else UNLIMITED, n, *strides, **constants,
    )  # fmt: skip
    return out, lse


def attention_backward(
    grad: Tensor,
    saved: tuple[Tensor, Tensor, Tensor, Tensor, Tensor],
    gradients: tuple[Tensor, Tensor, Tensor],
    queries: PackedRows,
    keys: PackedRows,
    causal: bool,
    rate: float,
    seed: Tensor | None,
) -> None:
    """Write the gradients of q, k and v to *gradients*; *saved* is q, k, v, output and log2-sum-exp."""
    q, k, v, out, lse = saved
    n, heads, dim = q.shape
    constants = _constants(q, rate)
    delta = torch.empty_like(lse)
    scalars = dim**-0.5, rate, 0 if causal else UNLIMITED, n
    seed = seed if rate > 0 else lse
    strides = [s for x in (q, k, v, out, grad, gradients[0]) for s in x.stride()[:2]]
    _query_kernel[(triton.cdiv(n, constants["BLOCK_Q"]), heads)](
        q, k, v, out, lse, grad, gradients[0], delta,
        queries.sentence, keys.sentence, keys.starts, seed, *scalars, *strides, **constants,
    )  # fmt: skip
    strides = [s for x in (q, k, v, grad, *gradients[1:]) for s in x.stride()[:2]]
    _key_kernel[(triton.cdiv(len(k), constants["BLOCK_K"]), heads)](
        q, k, v, lse, grad, delta, *gradients[1:],
        queries.sentence, keys.sentence, queries.starts, keys.starts, seed,
        *scalars, len(k), *strides, **constants,
    )  # fmt: skip
