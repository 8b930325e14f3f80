"""Surface attention: each target position attends to the source embeddings.

``r = W_o softmax(Q K^T / sqrt(d_h)) V`` with ``Q = W_q q`` (q: output of a decoder layer, T x B x C),
``K = W_k k`` (k: encoder output, S x B x C') and ``V = W_v v`` (v: source embeddings, B x S x C')
(SurfaceFusion, Liu et al., ICLR 2021).

fairseq's attention cannot do this: with cached keys it computes V from the key. Here keys and values are
projected once per sentence, cached, and reordered with the beams in beam search.
"""

from typing import Any

import torch
import torch.nn.functional as F
from fairseq.incremental_decoding_utils import FairseqIncrementalState
from fairseq.modules import FairseqDropout
from torch import Tensor, nn


class SurfaceAttention(FairseqIncrementalState, nn.Module):
    """Multi-head attention whose keys and values come from different tensors.

    Args:
        embed_dim: width C of the query and of the result.
        source_dim: width C' of key and value.
        num_heads: must divide *embed_dim*.
        dropout: probability of dropping an attention weight, in training (or with ``--retain-dropout``).
    """

    get_incremental_state: Any  # fairseq's, untyped
    set_incremental_state: Any

    def __init__(self, embed_dim: int, source_dim: int, num_heads: int, dropout: float) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.dropout_module = FairseqDropout(dropout, module_name=type(self).__name__)
        self.q_proj = nn.Linear(embed_dim, embed_dim)
        self.k_proj = nn.Linear(source_dim, embed_dim)
        self.v_proj = nn.Linear(source_dim, embed_dim)
        self.out_proj = nn.Linear(embed_dim, embed_dim)
        # fairseq's initialisation of attention whose three inputs have one width.
        for proj in (self.q_proj, self.k_proj, self.v_proj):
            nn.init.xavier_uniform_(proj.weight, gain=2**-0.5)
        nn.init.xavier_uniform_(self.out_proj.weight)
        nn.init.zeros_(self.out_proj.bias)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
    ) -> Tensor:
        """Attend from *query* to *key* and return the weighted sum of *value*.

        Args:
            query: T x B x C.
            key: S x B x C'.
            value: B x S x C'.
            key_padding_mask: bool, B x S, true at padding.
            incremental_state: caches projected keys and values between decoding steps.

        Returns:
            B x T x C.
        """
        cache = None
        if incremental_state is not None:
            cache = self.get_incremental_state(incremental_state, "surface")
        if cache is None:
            cache = {
                "key": self.split_heads(self.k_proj(key.transpose(0, 1))),
                "value": self.split_heads(self.v_proj(value)),
                "keep": ~key_padding_mask[:, None, None, :],
            }
            if incremental_state is not None:
                self.set_incremental_state(incremental_state, "surface", cache)
        drop = self.training or self.dropout_module.apply_during_inference
        output = F.scaled_dot_product_attention(
            self.split_heads(self.q_proj(query.transpose(0, 1))),
            cache["key"],
            cache["value"],
            attn_mask=cache["keep"],
            dropout_p=self.dropout_module.p if drop else 0.0,
        )
        return self.out_proj(output.transpose(1, 2).flatten(2))

    def weights(self, query: Tensor, key: Tensor, key_padding_mask: Tensor) -> Tensor:
        """Attention weights of each query over the source positions, without dropout: B x H x T x S.

        Args:
            query, key, key_padding_mask: as in :meth:`forward`.
        """
        q = self.split_heads(self.q_proj(query.transpose(0, 1)))
        k = self.split_heads(self.k_proj(key.transpose(0, 1)))
        scores = (q @ k.transpose(-1, -2)).float() * q.shape[-1] ** -0.5
        return scores.masked_fill(key_padding_mask[:, None, None, :], -torch.inf).softmax(-1)

    def split_heads(self, x: Tensor) -> Tensor:
        """B x N x C -> B x H x N x (C / H)."""
        return x.unflatten(-1, (self.num_heads, -1)).transpose(1, 2)

    def reorder_incremental_state(
        self, incremental_state: dict[str, dict[str, Tensor | None]], new_order: Tensor
    ) -> None:
        """Reorder the cache with the beams: the new row i is the old row ``new_order[i]``."""
        cache: dict[str, Any] | None = self.get_incremental_state(incremental_state, "surface")
        if cache is not None:
            reordered = {name: x.index_select(0, new_order) for name, x in cache.items()}
            self.set_incremental_state(incremental_state, "surface", reordered)
