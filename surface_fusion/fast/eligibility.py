"""Which models the fast paths know, and why not the others."""

from typing import Any

import torch
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase

from surface_fusion.config import SurfaceFusionConfig
from surface_fusion.layerwise import LayerwiseDecoderLayer


def why_not_fused(model: Any) -> str | None:
    """Why the output layer and the loss of *model* cannot be one operation, or None if they can."""
    decoder = getattr(model, "decoder", None)
    cfg = getattr(decoder, "cfg", None)
    if not isinstance(cfg, SurfaceFusionConfig):
        return f"{type(model).__name__} is not a model of surface-fusion"
    if cfg.sf_plain:
        return "--sf-plain"
    if cfg.adaptive_softmax_cutoff is not None:
        return "--adaptive-softmax-cutoff"
    if cfg.surfacefusion is not None and cfg.mode.exponentiated:
        return f"--sf-mode {cfg.sf_mode}"
    if torch.is_autocast_enabled():
        return "--amp"
    return None


def why_not_packed(model: Any) -> str | None:
    """Why the layers of *model* cannot run without padding, or None if they can."""
    cfg, encoder, decoder = model.decoder.cfg, model.encoder, model.decoder
    for flag, reason in (
        (cfg.encoder.layerdrop > 0 or cfg.decoder.layerdrop > 0, "LayerDrop"),
        (cfg.checkpoint_activations, "--checkpoint-activations"),
        (cfg.quant_noise.pq > 0 or cfg.quant_noise.scalar > 0, "quantisation noise"),
        (cfg.adaptive_input, "--adaptive-input"),
        (cfg.cross_self_attention, "--cross-self-attention"),
        (cfg.no_cross_attention, "--no-cross-attention"),
        (cfg.base_layers > 0, "--base-layers"),
        (cfg.encoder.xformers_att_config or cfg.decoder.xformers_att_config, "xFormers attention"),
    ):
        if flag:
            return reason
    known = (TransformerEncoderLayerBase, TransformerDecoderLayerBase, LayerwiseDecoderLayer)
    for layer in [*encoder.layers, *decoder.layers]:
        if type(layer) not in known:
            return f"a layer of type {type(layer).__name__}"
        for part in ("attn_ln", "c_attn", "ffn_layernorm", "w_resid"):
            if getattr(layer, part, None) is not None:
                return f"a layer with {part}"
    return None
