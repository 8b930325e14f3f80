"""Attention for one decoding step, where the beams of a sentence share keys and values.

``softmax(Q K^T / sqrt(d) + bias) V`` per sentence and head: queries S x H x B x d for S sentences of B beams,
keys and values S x H x N x d; bias S x 1 x B x N or S x 1 x 1 x N.

On a GPU this is the kernel of ``beam_attention_triton.py``, which is tested against torch's
``scaled_dot_product_attention``.
"""

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.ops.backend import use_kernels

WIDEST_HEAD = 128
"""Maximum width of a head for the kernel; torch computes wider ones, such as the surface's single head."""


def beam_attention(query: Tensor, key: Tensor, value: Tensor, bias: Tensor, last: Tensor) -> Tensor:
    """Return the attention output of each beam, heads concatenated: S x B x (H d).

    Args:
        query, key, value, bias: see above; the last axes are contiguous.
        last: 1, int64: the last position that the kernel reads; key i belongs to position i // B. *bias* must
            mask all later positions.
    """
    if use_kernels(query) and query.shape[-1] <= WIDEST_HEAD:
        from surface_fusion.ops.beam_attention_triton import beam_attention_forward

        return beam_attention_forward(query, key, value, bias, last)
    if query.is_cuda or len(query) == 1:
        bias = bias.expand(-1, query.shape[1], query.shape[2], -1)
        output = F.scaled_dot_product_attention(query, key, value, attn_mask=bias)
    else:  # with so few queries, torch's attention gains nothing from a second core
        scores = torch.matmul(query * query.shape[-1] ** -0.5, key.transpose(2, 3)).add_(bias)
        output = torch.matmul(scores.softmax(dim=-1), value)
    return output.transpose(1, 2).flatten(2)
