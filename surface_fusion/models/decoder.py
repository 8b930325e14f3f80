"""Transformer decoder whose softmax layer also reads the source embeddings.

With h the output of the last decoder layer and r the vector read from the source embeddings (both B x T x C):

1. both go through one shared residual feed-forward layer (``--sf-ffn``) and a linear map each
   (``--sf-linear``);
2. *features* are ``h + tau r`` or ``g h + (1-g) r`` (B x T x C) for the modes that need one vocabulary
   projection, and the pair (h, r) (B x T x 2 x C) for the others, see ``ops/distributions.py``;
3. *logits* are ``E features``: B x T x V, or B x T x 2V with the target branch first. Operations of fairseq
   on logits (temperature, slicing) thus apply to both branches. A learned gate is appended as two columns,
   (g, 1-g); their ratio does not change when logits are scaled.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, Optional

import torch
from fairseq import utils
from fairseq.models.transformer import TransformerDecoderBase
from fairseq.models.transformer.transformer_decoder import Linear
from fairseq.modules import FairseqDropout
from torch import Tensor, nn

from surface_fusion.decoding.incremental import STATE, FastDecoding
from surface_fusion.encoder_fusion.layer_combination import CombinedLayers
from surface_fusion.models.build_fusion import build_combination
from surface_fusion.modules.layerdrop import DepthKeepingLayerDrop, skip_decoder_layer
from surface_fusion.modules.layerwise_attention import LayerwiseDecoderLayer, wrap_layer
from surface_fusion.modules.no_feed_forward import without_feed_forward
from surface_fusion.modules.surface_attention import SurfaceAttention
from surface_fusion.modules.torchscript import NotScriptable
from surface_fusion.modules.word_dropout import WordDropout
from surface_fusion.ops.distributions import exponentiated_log_probs, hard_log_probs, log_softmax
from surface_fusion.ops.precision import at_least_float32


class SurfaceFusionDecoder(NotScriptable, TransformerDecoderBase):
    """Transformer decoder with surface fusion, encoder layer fusion and layer-wise attention."""

    if TYPE_CHECKING:  # TorchScript would read these annotations as attribute types
        layers: Any  # fairseq's ModuleList
        get_incremental_state: Any  # fairseq's, untyped
        set_incremental_state: Any

    def __init__(self, cfg: Any, dictionary: Any, embed_tokens: Any, **kwargs: Any) -> None:
        super().__init__(cfg, dictionary, embed_tokens, **kwargs)
        self.dropout_module.module_name = "TransformerDecoder"  # for --retain-dropout-modules
        self.fast_decoding = FastDecoding()
        if cfg.memory_per_layer:
            for i in range(len(self.layers)):
                getattr(self.layers[i], "module", self.layers[i]).memory_index = i
        if self.decoder_layerdrop > 0:
            self.layers = DepthKeepingLayerDrop(self.layers, skip_decoder_layer)
        if cfg.target_word_dropout > 0:
            self.project_in_dim = WordDropout(cfg.target_word_dropout)  # before the positions are added
        self.combination = build_combination(cfg, cfg.decoder, self.embed_dim)
        if self.combination is not None:
            self.layers = CombinedLayers(self.layers, self.combination)
        if cfg.surfacefusion is not None:
            self._build_fusion(cfg)

    def _build_fusion(self, cfg: Any) -> None:
        """Allocate only the parameters that the flags use, named as in the published checkpoints."""
        dim = self.output_embed_dim
        self.paired = cfg.mode.exponentiated or (cfg.mode.gated and not cfg.sf_renormalize)
        if cfg.surfacefusion == "att":
            self.query_depth = range(self.num_layers)[-1 if cfg.sf_idx is None else cfg.sf_idx] + 1
            self.sf_attn = SurfaceAttention(
                self.embed_dim, cfg.encoder.embed_dim, cfg.sf_attention_heads, cfg.attention_dropout
            )
        if cfg.sf_ffn:
            self.fc1 = Linear(dim, cfg.decoder.ffn_embed_dim)
            self.fc2 = Linear(cfg.decoder.ffn_embed_dim, dim)
            self.activation_fn = utils.get_activation_fn(str(cfg.activation_fn))
            self.activation_dropout = FairseqDropout(
                float(cfg.activation_dropout), module_name=self.dropout_module.module_name
            )
        if cfg.sf_linear:
            self.tgt_out_dim = Linear(dim, dim, bias=False)
            self.src_out_dim = Linear(dim, dim, bias=False)
        if cfg.learned_gate:
            self.meanmaxweight = nn.Parameter(torch.empty(1, 2 * dim))
            nn.init.normal_(self.meanmaxweight, std=dim**-0.5)

    @torch.no_grad()
    def start_as_plain(self) -> None:
        """Initialise so that the target branch equals the plain decoder.

        In the soft and postnorm modes the fused distribution does as well.
        """
        zeroed = [self.fc2] if self.cfg.sf_ffn else []
        if self.cfg.surfacefusion == "att" and not self.paired and not self.cfg.mode.gated:
            zeroed.append(self.sf_attn.out_proj)
        for module in zeroed:
            module.weight.zero_()
            module.bias.zero_()
        if self.cfg.sf_linear:
            nn.init.eye_(self.tgt_out_dim.weight)

    def build_decoder_layer(self, cfg: Any, no_encoder_attn: bool = False) -> Any:
        """Build a layer as fairseq does; with a memory per layer, one that attends to its own slice."""
        if cfg.memory_per_layer:
            layer = wrap_layer(LayerwiseDecoderLayer(cfg, no_encoder_attn), cfg)
        else:
            layer = super().build_decoder_layer(cfg, no_encoder_attn)
        return without_feed_forward(layer) if cfg.no_decoder_fnn else layer

    def forward(
        self,
        prev_output_tokens: Tensor,
        encoder_out: Mapping[str, list[Tensor]] | None = None,
        incremental_state: dict[str, Any] | None = None,
        features_only: bool = False,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Compute logits as fairseq's decoder does; incremental decoding uses the fast path if possible.

        On the fast path (:mod:`surface_fusion.decoding.incremental`), ``extra`` contains no inner states,
        and no attention if ``make_generation_fast_`` has disabled it.
        """
        state = None
        if incremental_state is not None:
            state = self.get_incremental_state(incremental_state, STATE)
            has_options = any(x is not None and x is not False for x in kwargs.values())
            if encoder_out is not None and not incremental_state and not has_options:
                state = self.fast_decoding.new_state(self, prev_output_tokens, encoder_out)
                if state is not None:
                    self.set_incremental_state(incremental_state, STATE, state)
        if state is None:
            return super().forward(
                prev_output_tokens, encoder_out, incremental_state, features_only, **kwargs
            )
        features, attention = self.fast_decoding.step(self, state, prev_output_tokens)
        return features if features_only else self.output_layer(features), {"attn": [attention]}

    def reorder_incremental_state_scripting(
        self, incremental_state: dict[str, Any], new_order: Tensor
    ) -> None:
        """Reorder the cache with the hypotheses: row i becomes row ``new_order[i]``."""
        state = self.get_incremental_state(incremental_state, STATE)
        if state is None:
            super().reorder_incremental_state_scripting(incremental_state, new_order)
        else:
            self.fast_decoding.reorder(self, state, new_order)

    def train(self, mode: bool = True) -> "SurfaceFusionDecoder":
        """Set the mode as ``nn.Module`` does; entering training mode frees the memory of fast decoding."""
        if mode:
            self.fast_decoding.release()
        return super().train(mode)

    def extract_features(
        self,
        prev_output_tokens: Tensor,
        encoder_out: dict[str, list[Tensor]] | None,
        incremental_state: dict[str, dict[str, Tensor | None]] | None = None,
        *args: Any,
        **kwargs: Any,
    ) -> tuple[Tensor, dict[str, Any]]:
        """Return the input of :meth:`output_layer`: B x T x C, or B x T x 2 x C (see the module)."""
        x, extra = super().extract_features(
            prev_output_tokens, encoder_out, incremental_state, *args, **kwargs
        )
        if self.cfg.surfacefusion is None:
            return x, extra
        if encoder_out is None:
            raise ValueError("encoder_out is None; surface fusion needs the encoder's output")
        surface = encoder_out["encoder_embedding"][0]
        if self.cfg.surfacefusion == "att":
            query = extra["inner_states"][self.query_depth]
            key = encoder_out["encoder_out"][0][..., -self.cfg.encoder.embed_dim :]
            if not self.cfg.sf_no_detach:
                query, key = query.detach(), key.detach()
            mask = encoder_out["encoder_padding_mask"][0]
            r = self.sf_attn(query, key, surface, mask, incremental_state)
            if self.project_out_dim is not None:
                r = self.project_out_dim(r)
        else:
            r = surface.expand_as(x)
        return self.fuse(self.head(x, "tgt"), self.head(r, "src")), extra

    def head(self, x: Tensor, branch: str) -> Tensor:
        """Apply the layers of a branch before the output embedding."""
        return self.own_head(self.shared_head(x), branch)

    def shared_head(self, x: Tensor) -> Tensor:
        """Apply the residual feed-forward layer that both branches share."""
        if not self.cfg.sf_ffn:
            return x
        hidden = self.activation_dropout(self.activation_fn(self.fc1(x)))
        return x + self.dropout_module(self.fc2(hidden))

    def own_head(self, x: Tensor, branch: str) -> Tensor:
        """Apply the linear map of one branch."""
        return getattr(self, f"{branch}_out_dim")(x) if self.cfg.sf_linear else x

    def fuse(self, h: Tensor, r: Tensor) -> Tensor:
        """Combine the two branches, B x T x C each, into features."""
        if not self.cfg.mode.gated:
            r = r * self.cfg.mode.scale(self.cfg.sf_softmax_tau)
        if self.paired:
            return torch.stack([h, r], dim=2)
        if self.cfg.mode.gated:
            gate = self.gate(torch.stack([h, r], dim=2)) if self.cfg.learned_gate else self.cfg.sf_gate
            return gate * h + (1 - gate) * r
        return h + r

    def gate(self, features: Tensor) -> Tensor:
        """Compute the learned weight of the target branch, B x T x 1, from features B x T x 2 x C."""
        return torch.sigmoid(features.flatten(2) @ self.meanmaxweight.t())

    def output_layer(self, features: Tensor) -> Tensor:
        """Project *features* to logits: B x T x V, or both branches concatenated (see the module)."""
        if self.cfg.surfacefusion is None or not self.paired:
            return super().output_layer(features)
        logits = self.output_projection(features).flatten(2)
        if self.cfg.learned_gate:
            gate = self.gate(features)
            logits = torch.cat([logits, gate, 1 - gate], dim=-1)
        return logits

    @torch.jit.unused  # tracing compiles it otherwise: fairseq exports the model's method that calls it
    def get_normalized_probs(
        self,
        net_output: tuple[Tensor, Optional[dict[str, list[Optional[Tensor]]]]],
        log_probs: bool,
        sample: Optional[dict[str, Tensor]] = None,
    ) -> Tensor:
        """Return the (log-)probabilities of the fused distribution, ... x V, in float32 at least.

        In hard mode they sum to less than 1, as published.
        """
        if self.cfg.surfacefusion is None:
            return super().get_normalized_probs(net_output, log_probs, sample)
        logits = net_output[0]
        if not self.paired:
            return log_softmax(logits) if log_probs else log_softmax(logits).exp()
        gate: Tensor | float = self.cfg.sf_gate
        if self.cfg.learned_gate:
            logits, gates = logits[..., :-2], at_least_float32(logits[..., -2:])
            gate = gates[..., :1] / gates.sum(dim=-1, keepdim=True)
        if self.cfg.mode.exponentiated:
            fused = exponentiated_log_probs(*logits.chunk(2, dim=-1))
        else:
            fused = hard_log_probs(logits.unflatten(-1, (2, -1)), gate)
        return fused if log_probs else fused.exp()
