"""Pool the source embeddings into one vector by mean or maximum (``--surfacefusion mean|max``).

``r = mean_n x_n`` or ``r = max_n x_n`` over source positions n, per channel; the same vector for
every target position (SurfaceFusion, Liu et al., ICLR 2021).
"""

import torch
from torch import Tensor

from surface_fusion.ops.precision import accumulation_dtype

PUBLISHED_FIRST_ID = 50
"""The published code pools only tokens whose id is at least this (``--sf-pool-published``)."""


def pooled_tokens(src_tokens: Tensor, padding_idx: int, published: bool) -> Tensor:
    """Which tokens are pooled: bool, B x S."""
    return src_tokens.ge(PUBLISHED_FIRST_ID) if published else src_tokens.ne(padding_idx)


def mean_pool(embed: Tensor, keep: Tensor) -> Tensor:
    """Mean of the kept rows of *embed* (B x S x C), zero where none is kept: B x 1 x C."""
    keep = keep.unsqueeze(-1)
    wide = accumulation_dtype(embed.dtype)  # a sum over a long sentence overflows float16
    total = embed.masked_fill(~keep, 0).sum(dim=1, keepdim=True, dtype=wide)
    return (total / keep.sum(dim=1, keepdim=True).clamp(min=1)).to(embed.dtype)


def max_pool(embed: Tensor, keep: Tensor, published: bool) -> Tensor:
    """Maximum of the kept rows of *embed* (B x S x C), zero where none is kept: B x 1 x C.

    The published maximum counts each excluded token as a zero vector; otherwise it is ignored.
    """
    keep = keep.unsqueeze(-1)
    left_out = 0.0 if published else torch.finfo(embed.dtype).min
    pooled = embed.masked_fill(~keep, left_out).amax(dim=1, keepdim=True)
    return pooled.masked_fill(~keep.any(dim=1, keepdim=True), 0)
