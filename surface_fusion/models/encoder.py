"""Transformer encoder that also passes the source embeddings (the surface) to the decoder.

``encoder_out["encoder_embedding"]`` is the surface that the softmax layer reads:

* ``att``: the scaled source embeddings ``sqrt(d) E[src]``, B x S x C, or with ``--sf-posedemb`` the encoder's
  input; they share the dropout mask of the encoder's input;
* ``mean``, ``max``: one pooled vector per sentence, B x 1 x C, with its own dropout.

``encoder_out["encoder_out"]`` is the fusion of the layers' outputs (``--encoder-fusion``). If each decoder
layer attends to a tensor of its own (``modules/layerwise_attention.py``), these are concatenated on the
channel axis; with ``att`` and layer attention the encoder's output follows them.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import torch
from fairseq.models.transformer import TransformerEncoderBase
from torch import Tensor

from surface_fusion.decoding.encoder_out import ReorderedEncoderOut
from surface_fusion.encoder_fusion import LayerAttention
from surface_fusion.encoder_fusion.layer_combination import CombinedLayers
from surface_fusion.encoder_fusion.states import fused_states
from surface_fusion.models.build_fusion import build_combination, build_fusion
from surface_fusion.modules.layerdrop import DepthKeepingLayerDrop, skip_encoder_layer
from surface_fusion.modules.layerwise_attention import concatenate_layers
from surface_fusion.modules.no_feed_forward import without_feed_forward
from surface_fusion.modules.pooling import max_pool, mean_pool, pooled_tokens
from surface_fusion.modules.torchscript import NotScriptable
from surface_fusion.modules.word_dropout import WordDropout


class SurfaceFusionEncoder(NotScriptable, TransformerEncoderBase):
    """Transformer encoder with surface fusion, encoder layer fusion and layer-wise attention."""

    if TYPE_CHECKING:  # TorchScript would read these annotations as attribute types
        layers: Any  # fairseq's ModuleList
        fusion: Any
        combination: Any

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: Any, return_fc: bool = False) -> None:
        super().__init__(cfg, dictionary, embed_tokens, return_fc=return_fc)
        self.dropout_module.module_name = "TransformerEncoder"  # for --retain-dropout-modules
        if self.encoder_layerdrop > 0:
            self.layers = DepthKeepingLayerDrop(self.layers, skip_encoder_layer)
        self.word_dropout = WordDropout(cfg.source_word_dropout) if cfg.source_word_dropout > 0 else None
        self.fusion = build_fusion(cfg)
        self.combination = build_combination(cfg, cfg.encoder, cfg.encoder.embed_dim)
        if self.combination is not None:
            self.layers = CombinedLayers(self.layers, self.combination)
        key_is_trained = cfg.surfacefusion == "att" and cfg.sf_no_detach
        if isinstance(self.fusion, LayerAttention) and self.layer_norm is not None and not key_is_trained:
            self.layer_norm.requires_grad_(False)  # its only output is the surface's key, which is detached

    def build_encoder_layer(self, cfg: Any) -> Any:
        """Build a layer as fairseq does; ``--no-encoder-fnn`` removes its feed-forward sublayer."""
        layer = super().build_encoder_layer(cfg)
        return without_feed_forward(layer) if cfg.no_encoder_fnn else layer

    def forward(
        self,
        src_tokens: Tensor,
        src_lengths: Tensor | None = None,
        return_all_hiddens: bool = False,
        token_embeddings: Tensor | None = None,
    ) -> dict[str, list[Tensor]]:
        """Encode as fairseq's encoder does; the module's docstring describes the two entries that differ."""
        if self.word_dropout is not None and self.training:
            if token_embeddings is None:
                token_embeddings = self.embed_tokens(src_tokens)
            token_embeddings = self.word_dropout(token_embeddings)
        needs_states = return_all_hiddens or self.cfg.layer_wise_attention or self.fusion is not None
        out = super().forward(src_tokens, src_lengths, needs_states, token_embeddings)
        if self.cfg.layer_wise_attention:
            out["encoder_out"] = [concatenate_layers(out["encoder_states"], out["encoder_out"][0])]
        elif self.fusion is not None:
            out["encoder_out"] = [self._fused(out, src_tokens, token_embeddings)]
        if not return_all_hiddens:
            out["encoder_states"] = []
        return out

    def _fused(
        self, out: dict[str, list[Tensor]], src_tokens: Tensor, token_embeddings: Tensor | None
    ) -> Tensor:
        """Fuse the layers' outputs: S x B x C; for M decoder layers S x B x (M C), plus C for the key."""

        def word_embeddings() -> Tensor:
            embed = self.embed_tokens(src_tokens) if token_embeddings is None else token_embeddings
            return self.embed_scale * embed.transpose(0, 1)

        states = fused_states(self.cfg, self.fusion, out["encoder_states"], word_embeddings)
        fused: Tensor = self.fusion(states)
        if not isinstance(self.fusion, LayerAttention):
            return fused if self.layer_norm is None else self.layer_norm(fused)
        if self.cfg.surfacefusion != "att":
            return fused
        return torch.cat([fused, *out["encoder_out"]], dim=-1)  # the surface's key is the encoder's output

    def reorder_encoder_out(
        self, encoder_out: Mapping[str, list[Tensor]], new_order: Tensor
    ) -> Mapping[str, list[Tensor]]:
        """Reorder the batch on first access, with ``--sf-plain`` at once: row i becomes ``new_order[i]``."""
        if self.cfg.sf_plain:
            return super().reorder_encoder_out(encoder_out, new_order)
        if isinstance(encoder_out, ReorderedEncoderOut):
            return encoder_out.reordered(new_order)
        return ReorderedEncoderOut(encoder_out, new_order)

    def forward_embedding(
        self, src_tokens: Tensor, token_embedding: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """Return the encoder's input (B x S x C) and the surface, see the module's docstring."""
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
