"""Triton: attention for one decoding step; operation, shapes and oracle are those of ``beam_attention.py``.

torch's kernels are made for many queries: they use a block of 64 for four of them, in float32 without tensor
cores. Here each sentence and head is one small block that reads each key and value once, up to the last
position written. One compilation serves both self-attention and encoder attention.
"""

import triton
import triton.language as tl
from torch import Tensor


@triton.jit
def _read_kernel(
    q_base: tl.tensor, k_base: tl.tensor, v_base: tl.tensor, bias_base: tl.tensor, out_base: tl.tensor,
    last_base: tl.tensor, scale: tl.tensor, n: tl.tensor,
    q_sentence: tl.tensor, q_head: tl.tensor, q_beam: tl.tensor,
    k_sentence: tl.tensor, k_head: tl.tensor, k_row: tl.tensor,
    v_sentence: tl.tensor, v_head: tl.tensor, v_row: tl.tensor,
    bias_sentence: tl.tensor, bias_beam: tl.tensor,
    HEADS: tl.constexpr, BEAM: tl.constexpr, D: tl.constexpr,
    BLOCK_B: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
) -> None:  # fmt: skip
    sentence = (tl.program_id(0) // HEADS).to(tl.int64)
    head = tl.program_id(0) % HEADS
    b, d, i = tl.arange(0, BLOCK_B), tl.arange(0, BLOCK_D), tl.arange(0, BLOCK_N)
    within = (b < BEAM)[:, None] & (d < D)[None, :]
    q_base += sentence * q_sentence + head * q_head
    q = tl.load(q_base + b[:, None] * q_beam + d[None, :], mask=within, other=0.0)
    k_base += sentence * k_sentence + head * k_head
    v_base += sentence * v_sentence + head * v_head
    bias_base += sentence * bias_sentence
    n = tl.minimum(n, (tl.load(last_base).to(tl.int32) + 1) * BEAM)

    peak = tl.full((BLOCK_B,), float("-inf"), tl.float32)
    total = tl.zeros((BLOCK_B,), tl.float32)
    acc = tl.zeros((BLOCK_B, BLOCK_D), tl.float32)
    start = 0
    while start < n:
        rows = start + i
        mask = (rows < n)[:, None] & (d < D)[None, :]
        k = tl.load(k_base + rows[:, None] * k_row + d[None, :], mask=mask, other=0.0)
        v = tl.load(v_base + rows[:, None] * v_row + d[None, :], mask=mask, other=0.0)
        bias = tl.load(
            bias_base + b[:, None] * bias_beam + rows[None, :],
            mask=(b < BEAM)[:, None] & (rows < n)[None, :], other=float("-inf"),
        )  # fmt: skip
        s = tl.dot(q, tl.trans(k), input_precision="tf32x3") * scale + bias.to(tl.float32)
        higher = tl.maximum(peak, tl.max(s, axis=1))
        finite = tl.where(higher == float("-inf"), 0.0, higher)
        p = tl.exp(s - finite[:, None])
        old = tl.exp(peak - finite)
        total = total * old + tl.sum(p, axis=1)
        acc = acc * old[:, None] + tl.dot(p.to(v.dtype), v, input_precision="tf32x3")
        peak = higher
        start += BLOCK_N
    attended = acc / tl.where(total > 0, total, 1.0)[:, None]
    out_base += (sentence * BEAM * HEADS + head) * D
    place = out_base + b[:, None] * (HEADS * D) + d[None, :]
    tl.store(place, attended.to(out_base.dtype.element_ty), mask=within)


def beam_attention_forward(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, last: Tensor) -> Tensor:
    """Arguments and result are those of :func:`surface_fusion.ops.beam_attention.beam_attention`."""
    sentences, heads, beam, dim = query.shape
    out = query.new_empty(sentences, beam, heads * dim)
    block_d = max(triton.next_power_of_2(dim), 16)
    strides = [s for x in (query, key, value) for s in x.stride()[:3]]
    bias_beam = bias.stride(2) if bias.shape[2] > 1 else 0
    _read_kernel[(sentences * heads,)](
        query, key, value, bias, out, last, dim**-0.5, key.shape[2],
        *strides, bias.stride(0), bias_beam,
        HEADS=heads, BEAM=beam, D=dim, BLOCK_B=max(triton.next_power_of_2(beam), 16),
        BLOCK_N=64 if block_d <= 64 else 32, BLOCK_D=block_d, num_warps=4, num_stages=2,
    )  # fmt: skip
    return out
