"""Decide whether a decoder supports fast incremental decoding, and give the reason if it does not."""

from typing import Any

import torch
from fairseq.modules import (
    FairseqDropout,
    LayerDropModuleList,
    LayerNorm,
    LearnedPositionalEmbedding,
    MultiheadAttention,
    SinusoidalPositionalEmbedding,
)
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import nn

from surface_fusion.encoder_fusion import Combination, methods
from surface_fusion.encoder_fusion.layer_combination import CombinedLayers
from surface_fusion.modules.layerdrop import DepthKeepingLayerDrop
from surface_fusion.modules.layerwise_attention import LayerwiseDecoderLayer
from surface_fusion.modules.stacks import SCALES, has_forward_hooks
from surface_fusion.modules.surface_attention import SurfaceAttention
from surface_fusion.modules.word_dropout import WordDropout

DECODER_MODULES = {
    *(nn.Linear, nn.Embedding, nn.LayerNorm, nn.ModuleList, type(LayerNorm(1)), FairseqDropout),
    *(MultiheadAttention, SurfaceAttention, LearnedPositionalEmbedding, SinusoidalPositionalEmbedding),
    *(LayerDropModuleList, DepthKeepingLayerDrop, TransformerDecoderLayerBase, LayerwiseDecoderLayer),
    *(WordDropout, CombinedLayers, nn.ParameterList),
}
"""Types of modules that fast incremental decoding supports, beside the registered combinations."""


def why_not_fast(decoder: Any) -> str | None:
    """Why *decoder* must decode by its modules, or None if it need not."""
    if decoder.cfg.sf_plain:
        return "--sf-plain"
    if decoder.cfg.cross_self_attention:
        return "--cross-self-attention"
    if not len(decoder.layers):
        return "no layers"
    if torch.is_autocast_enabled(next(decoder.parameters()).device.type):
        return "autocast"
    supported = {type(decoder), *DECODER_MODULES, *methods(Combination).values()}
    for name, module in decoder.named_modules():
        if type(module) not in supported:
            return f"{name} is a {type(module).__name__}"
        if has_forward_hooks(module):
            return f"a hook on {name}"
        if isinstance(module, FairseqDropout) and module.apply_during_inference:
            return "--retain-dropout"
        if isinstance(module, MultiheadAttention) and module.skip_embed_dim_check:
            return f"{name} has pruned heads"
        if isinstance(module, TransformerDecoderLayerBase):
            if module.encoder_attn is None:
                return "--no-cross-attention"
            for part in SCALES:
                if getattr(module, part, None) is not None:
                    return f"{name} has {part}"
    return None
