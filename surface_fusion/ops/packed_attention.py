"""Attention over packed rows: sentence i of the queries reads sentence i of the keys.

``softmax(Q K^T / sqrt(d)) V`` per sentence and head, with Q of N x H x d and K, V of M x H x d.

On a GPU the kernels of ``packed_attention_triton.py`` need no padding; they are tested against
:func:`attend_padded`. On a CPU :func:`attend_padded` pads the sentences for torch's
``scaled_dot_product_attention``; it is tested against the formula in a loop over sentences.
"""

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.ops.backend import use_kernels
from surface_fusion.ops.packed_rows import PackedRows, Padding

WIDEST_HEAD = 1024
"""Maximum width of a head: a block must fit into a multiprocessor. Callers must check it."""


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
        q, k, v = _pad(qkv, rows.padding).unbind(2)
        return _attend_padded(q, k, v, rows.padding, rows.padding, causal=causal, rate=rate)
    return _Attend.apply(qkv, None, None, rows, rows, causal, rate, seed)


def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, queries: PackedRows, keys: PackedRows, *, causal: bool, rate: float
) -> Tensor:
    """:func:`attend` by padding; synchronises to read the length of the longest sentence."""
    q, k, v = _pad(q, queries.padding), _pad(k, keys.padding), _pad(v, keys.padding)
    return _attend_padded(q, k, v, queries.padding, keys.padding, causal=causal, rate=rate)


def _attend_padded(
    q: Tensor, k: Tensor, v: Tensor, queries: Padding, keys: Padding, *, causal: bool, rate: float
) -> Tensor:
    """B x T x H x d and twice B x S x H x d to N x H x d."""
    # A causal query reads no later row, and padding comes after all rows of its sentence.
    mask = None if causal or keys.empty else keys.mask[:, None, None, :]
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    attended = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=rate, is_causal=causal)
    rows = attended.transpose(1, 2).flatten(0, 1)
    return rows if queries.empty else _Unpad.apply(rows, queries)


def _pad(x: Tensor, padding: Padding) -> Tensor:
    """N x ... to B x T x ..."""
    padded = x if padding.empty else _Pad.apply(x, padding)
    return padded.reshape(*padding.mask.shape, *x.shape[1:])


class _Pad(torch.autograd.Function):
    """N x ... to B T x ... Padding holds copies of rows: as keys they are masked, as queries discarded."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.row)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        return grad.index_select(0, ctx.padding.position), None  # the gradient of padding is zero


class _Unpad(torch.autograd.Function):
    """B T x ... to N x ..."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, padding: Padding) -> Tensor:
        ctx.padding = padding
        return x.index_select(0, padding.position)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:  # type: ignore[override]
        padding = ctx.padding
        zeros = grad.new_zeros(padding.mask.numel(), *grad.shape[1:])
        return zeros.index_copy_(0, padding.position, grad), None


class _Attend(torch.autograd.Function):
    """:func:`attend` by the Triton kernels.

    The first argument is (q, k, v) stacked on axis 1 if *k* and *v* are None; its gradient is stacked, too.
    """

    @staticmethod
    def forward(
        ctx: Any,
        q: Tensor,
        k: Tensor | None,
        v: Tensor | None,
        queries: PackedRows,
        keys: PackedRows,
        causal: bool,
        rate: float,
        seed: Tensor | None,
    ) -> Tensor:
        from surface_fusion.ops.packed_attention_triton import attention_forward

        inputs = [q] if k is None or v is None else [q, k, v]
        out, lse = attention_forward(*_unstacked(inputs), queries, keys, causal, rate, seed)
        ctx.save_for_backward(out, lse, *inputs)
        ctx.options = queries, keys, causal, rate, seed
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:  # type: ignore[override]
        from surface_fusion.ops.packed_attention_triton import attention_backward

        out, lse, *inputs = ctx.saved_tensors
        gradients = [torch.empty_like(x) for x in inputs]
        forward = (*_unstacked(inputs), out, lse)
        attention_backward(grad.contiguous(), forward, _unstacked(gradients), *ctx.options)
        return (*gradients, *(None,) * (8 - len(gradients)))


def _unstacked(inputs: list[Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = inputs[0].unbind(1) if len(inputs) == 1 else inputs
    return q, k, v
