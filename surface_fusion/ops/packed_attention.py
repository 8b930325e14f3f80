"""Attention over packed rows: sentence i of the queries reads sentence i of the keys.

Computes ``softmax(Q K^T / sqrt(d)) V`` per sentence and head, with Q of N x H x d and K, V of M x H x d. On a
GPU the kernels of ``attention_kernels.py`` need no padding. On a CPU, and as the reference in tests,
sentences are padded for ``scaled_dot_product_attention``.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.ops.backend import use_kernels
from surface_fusion.ops.packed_rows import PackedRows, Places

WIDEST_HEAD = 1024
"""Maximum width of a head, which must fit into a multiprocessor; callers must check it."""


def attend(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    queries: PackedRows,
    keys: PackedRows,
    *,
    causal: bool = False,
    rate: float = 0.0,
    seed: Tensor | None = None,
) -> Tensor:
    """Attention over packed rows: N x H x d.

    Args:
        q: N x H x d, the rows of *queries*.
        k, v: M x H x d, the rows of *keys*.
        causal: mask the later rows of a sentence; *keys* must be *queries*.
        rate: probability of dropping an attention weight.
        seed: seed of the dropout on a GPU, an int32 scalar there; on a CPU torch's generator is used.
    """
    if not use_kernels(q):
        return attend_padded(q, k, v, queries, keys, causal=causal, rate=rate)
    return _Attend.apply(q, k, v, queries, keys, causal, rate, seed)


def attend_self(
    qkv: Tensor, rows: PackedRows, *, causal: bool, rate: float = 0.0, seed: Tensor | None = None
) -> Tensor:
    """:func:`attend` for stacked queries, keys and values: N x 3 x H x d to N x H x d."""
    if not use_kernels(qkv):
        q, k, v = _pad(qkv, rows.places).unbind(2)
        return _attend_padded(q, k, v, rows.places, rows.places, causal=causal, rate=rate)
    return _AttendSelf.apply(qkv, rows, causal, rate, seed)


def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, queries: PackedRows, keys: PackedRows, *, causal: bool, rate: float
) -> Tensor:
    """:func:`attend` by padding; synchronises to read the length of the longest sentence."""
    q, k, v = _pad(q, queries.places), _pad(k, keys.places), _pad(v, keys.places)
    return _attend_padded(q, k, v, queries.places, keys.places, causal=causal, rate=rate)


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, queries: Places, keys: Places, *, causal: bool, rate: float
) -> Tensor:
    """B x T x H x d and twice B x S x H x d to N x H x d."""
    mask = None if causal or keys.full else keys.real[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=causal)
    rows = read.transpose(1, 2).flatten(0, 1)
    return rows if queries.full else _Unpad.apply(rows, queries)


def _pad(x: Tensor, places: Places) -> Tensor:
    """N x ... to B x T x ..."""
    padded = x if places.full else _Pad.apply(x, places)
    return padded.reshape(*places.real.shape, *x.shape[1:])


class _Pad(torch.autograd.Function):
    """Rows to places. Padding holds copies of some rows: as a key it is hidden, as a query thrown away."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return x.index_select(0, places.row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.places.place), None  # that of padding is zero


class _Unpad(torch.autograd.Function):
    """Places to rows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, places: Places) -> Tensor:
        ctx.places = places
        return x.index_select(0, places.place)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        places = ctx.places
        zeros = grad.new_zeros(places.real.numel(), *grad.shape[1:])
        return zeros.index_copy_(0, places.place, grad), None


class _Attend(torch.autograd.Function):
    """:func:`attend` by the Triton kernels."""

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        queries: PackedRows,
        keys: PackedRows,
        causal: bool,
        rate: float,
        seed: Tensor | None,
    ) -> Tensor:
        from surface_fusion.ops.packed_attention_triton import attention_forward

        out, lse = attention_forward(q, k, v, queries, keys, causal, rate, seed)
        ctx.save_for_backward(q, k, v, out, lse)
        ctx.how = queries, keys, causal, rate, seed
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from surface_fusion.ops.packed_attention_triton import attention_backward

        q, k, v, out, lse = ctx.saved_tensors
        into = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
        attention_backward(grad.contiguous(), (q, k, v, out, lse), into, *ctx.how)
        return *into, None, None, None, None, None


class _AttendSelf(torch.autograd.Function):
    """:func:`attend_self` by the Triton kernels, which write the gradients into one stacked tensor."""

    @staticmethod
    def forward(
        ctx: Any, qkv: Tensor, rows: PackedRows, causal: bool, rate: float, seed: Tensor | None
    ) -> Tensor:
        from surface_fusion.ops.packed_attention_triton import attention_forward

        q, k, v = qkv.unbind(1)
        out, lse = attention_forward(q, k, v, rows, rows, causal, rate, seed)
        ctx.save_for_backward(qkv, out, lse)
        ctx.how = rows, rows, causal, rate, seed
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from surface_fusion.ops.packed_attention_triton import attention_backward

        qkv, out, lse = ctx.saved_tensors
        into = torch.empty_like(qkv)
        q, k, v = qkv.unbind(1)
        d_q, d_k, d_v = into.unbind(1)
        attention_backward(grad.contiguous(), (q, k, v, out, lse), (d_q, d_k, d_v), *ctx.how)
        return into, None, None, None, None
