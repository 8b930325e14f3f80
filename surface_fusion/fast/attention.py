"""Attention over packed rows: sentence i of the queries reads sentence i of the keys.

``softmax(Q K^T / sqrt(d)) V`` per sentence and head, with Q of N x H x d and K, V of M x H x d, without ever
padding on a GPU: torch's FlashAttention (fp16, bf16) and its memory-efficient attention (fp32, wide heads)
take the sentences' boundaries. Elsewhere, and as the oracle, sentences are padded for
``scaled_dot_product_attention``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.fast.packed import PackedRows

FLASH_DTYPES = (torch.float16, torch.bfloat16)
FLASH_HEAD_DIM = 256
"""Wider heads are not for FlashAttention."""


def attend(
    q: Tensor, k: Tensor, v: Tensor, queries: PackedRows, keys: PackedRows, *, causal: bool, dropout: float
) -> Tensor:
    """What each row of *q* reads: N x H x d.

    Args:
        q: N x H x d, the rows of *queries*.
        k, v: M x H x d, the rows of *keys*.
        causal: no row sees a later one of its sentence.
        dropout: probability of dropping an attention weight.
    """
    if not q.is_cuda or q.dtype == torch.float64:
        return attend_padded(q, k, v, queries, keys, causal=causal, dropout=dropout)
    ends = queries.starts, keys.starts, queries.longest, keys.longest
    if q.dtype in FLASH_DTYPES and q.shape[-1] <= FLASH_HEAD_DIM:
        return torch.ops.aten._flash_attention_forward(q, k, v, *ends, dropout, causal, False)[0]
    mask = 1 if causal else 0
    batched = (x.unsqueeze(0) for x in (q, k, v))
    return torch.ops.aten._efficient_attention_forward(*batched, None, *ends, dropout, mask, True)[0].squeeze(0)


def attend_padded(
    q: Tensor, k: Tensor, v: Tensor, queries: PackedRows, keys: PackedRows, *, causal: bool, dropout: float
) -> Tensor:
    """:func:`attend` by way of padding; synchronises, since the number of sentences matters."""
    q, k, v = _pad(q, queries), _pad(k, keys), _pad(v, keys)
    lengths = keys.starts.diff()
    real = torch.arange(k.shape[2], device=k.device) < lengths[:, None]
    mask = None if causal and queries is keys else real[:, None, None, :]
    read = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout, is_causal=mask is None)
    return read.transpose(1, 2)[queries.sentence, queries.positions]


def _pad(x: Tensor, rows: PackedRows) -> Tensor:
    """N x H x d to B x H x T x d, zero where there is no row."""
    padded = x.new_zeros(len(rows.starts) - 1, rows.longest, *x.shape[1:])
    return padded.index_put((rows.sentence, rows.positions), x).transpose(1, 2)
