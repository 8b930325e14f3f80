"""fairseq's encoder, which also hands the source surface to the decoder.

``encoder_out["encoder_embedding"]`` holds what the softmax layer reads of the source:

* ``att``: the scaled source embeddings ``sqrt(d) E[src]``, B x S x C, with ``--sf-posedemb`` the encoder's
  input; dropped out by the very mask of the encoder's input;
* ``mean``, ``max``: one pooled vector a sentence, B x 1 x C, with its own dropout.

fairseq reorders that entry in beam search like the rest. With ``--layer-wise-attention``
``encoder_out["encoder_out"]`` holds all layers' outputs, see ``layerwise.py``.
"""

from collections.abc import Mapping
from typing import Any

import torch
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor

from surface_fusion.fast.encoder_out import ReorderedEncoderOut
from surface_fusion.layerdrop import DepthKeepingLayerDrop, skip_encoder_layer
from surface_fusion.layerwise import side_by_side
from surface_fusion.pooling import max_pool, mean_pool, pooled_tokens


class SurfaceFusionEncoder(TransformerEncoderBase):
    """Transformer encoder for surface fusion, layer-wise attention, or both."""

    layers: Any  # fairseq's ModuleList

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: Any, return_fc: bool = False) -> None:
        super().__init__(cfg, dictionary, embed_tokens, return_fc=return_fc)
        self.dropout_module.module_name = "TransformerEncoder"  # for --retain-dropout-modules
        if self.encoder_layerdrop > 0:
            self.layers = DepthKeepingLayerDrop(self.layers, skip_encoder_layer)

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """As fairseq's encoder, see the module's head for the two entries that differ."""
        layer_wise = self.cfg.layer_wise_attention
        out = super().forward(src_tokens, src_lengths, return_all_hiddens or layer_wise, token_embeddings)
        if layer_wise:
            out["encoder_out"] = [side_by_side(out["encoder_states"], out["encoder_out"][0])]
            if not return_all_hiddens:
                out["encoder_states"] = []
        return out

    def reorder_encoder_out(
        self, encoder_out: Mapping[str, list[Tensor]], new_order: Tensor
    ) -> Mapping[str, list[Tensor]]:
        """Row i becomes row ``new_order[i]``; but with ``--sf-plain``, only when somebody reads it."""
        if self.cfg.sf_plain:
            return super().reorder_encoder_out(encoder_out, new_order)
        if isinstance(encoder_out, ReorderedEncoderOut):
            return encoder_out.reordered(new_order)
        return ReorderedEncoderOut(encoder_out, new_order)

    def forward_embedding(
        self, src_tokens: Tensor, token_embedding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """The encoder's input (B x S x C) and the surface (see above), which share one dropout mask."""
        if self.cfg.surfacefusion is None:
            return super().forward_embedding(src_tokens, token_embedding)
        if token_embedding is None:
            token_embedding = self.embed_tokens(src_tokens)
        x = embed = self.embed_scale * token_embedding
        if self.embed_positions is not None:
            x = embed + self.embed_positions(src_tokens)
        if self.layernorm_embedding is not None:
            x = self.layernorm_embedding(x)
        if self.cfg.surfacefusion in ("mean", "max"):
            surface = self._pool(src_tokens, embed if self.cfg.sf_no_posedemb else x)
            x = self.dropout_module(x)
            surface = self.dropout_module(surface)
        else:
            mask = self.dropout_module(torch.ones_like(x))
            x = x * mask
            surface = embed * mask if self.cfg.sf_no_posedemb else x
        if self.quant_noise is not None:
            x = self.quant_noise(x)
        return x, surface

    def _pool(self, src_tokens: Tensor, embed: Tensor) -> Tensor:
        published = self.cfg.sf_pool_published
        keep = pooled_tokens(src_tokens, self.padding_idx, published)
        if self.cfg.surfacefusion == "mean":
            return mean_pool(embed, keep)
        return max_pool(embed, keep, published)
