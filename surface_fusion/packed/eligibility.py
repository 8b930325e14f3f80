"""Decide whether a model can be trained without padding, and return the reason if it cannot."""

from typing import Any

import torch
from fairseq.distributed import FullyShardedDataParallel
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase, TransformerEncoderLayerBase

from surface_fusion.config.flags import config_of
from surface_fusion.encoder_fusion import LayerAttention
from surface_fusion.modules.layerwise_attention import LayerwiseDecoderLayer
from surface_fusion.modules.stacks import SCALES, has_forward_hooks, layers_of, unwrapped
from surface_fusion.ops.backend import use_kernels
from surface_fusion.ops.packed_attention import WIDEST_HEAD
from surface_fusion.packed.flat_parameters import flat_of


def more_batches_follow(model: Any) -> bool:
    """Whether more batches of this update follow: fairseq's trainer runs all but the last in ``no_sync()``.

    *model* may be in distributed wrappers; without them this is unknown, and the result is False.
    """
    # The first is an attribute of fairseq's wrapper, the second of torch's.
    return getattr(model, "accumulate_grads", False) or not getattr(model, "require_backward_grad_sync", True)


def why_not_fused(model: Any) -> str | None:
    """Why the output layer and the loss of *model* cannot be one operation, or None if they can.

    *model* may be inside distributed wrappers.
    """
    if any(isinstance(module, FullyShardedDataParallel) for module in model.modules()):
        return "--ddp-backend fully_sharded"  # parameters are sharded outside of the modules' forward
    cfg = config_of(model)
    if cfg is None:
        return f"{type(unwrapped(model)).__name__} is not a model of surface-fusion"
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
    """Why *model* cannot be trained without padding, or None if it can.

    Args:
        model: may be inside distributed wrappers; :func:`why_not_fused` returned None for it.
    """
    model = unwrapped(model)
    weight = model.decoder.output_projection.weight
    if flat_of(model) is None:
        half = weight.dtype in (torch.float16, torch.bfloat16)
        return "an optimizer that is not flat_adam" + (" with --memory-efficient-fp16" if half else "")
    if weight.is_cuda and not use_kernels(weight):
        return f"{weight.dtype} on a GPU without Triton"
    cfg, encoder, decoder = model.decoder.cfg, model.encoder, model.decoder
    norm_is_unused = isinstance(encoder.fusion, LayerAttention) and encoder.layer_norm is not None
    untrained = set(encoder.layer_norm.parameters()) if norm_is_unused else set()
    if not all(parameter.requires_grad or parameter in untrained for parameter in model.parameters()):
        return "frozen parameters"
    widest = max(
        cfg.encoder.embed_dim // cfg.encoder.attention_heads,
        cfg.decoder.embed_dim // cfg.decoder.attention_heads,
        cfg.decoder.embed_dim // cfg.sf_attention_heads if cfg.surfacefusion == "att" else 0,
    )
    for flag, reason in (
        (cfg.encoder.layerdrop > 0 or cfg.decoder.layerdrop > 0, "LayerDrop"),
        (cfg.no_encoder_fnn or cfg.no_decoder_fnn, "layers without feed-forward sublayer"),
        (cfg.source_word_dropout > 0 or cfg.target_word_dropout > 0, "word dropout"),
        (cfg.checkpoint_activations, "--checkpoint-activations"),
        (cfg.quant_noise.pq > 0 or cfg.quant_noise.scalar > 0, "quantisation noise"),
        (cfg.adaptive_input, "--adaptive-input"),
        (cfg.cross_self_attention, "--cross-self-attention"),
        (cfg.no_cross_attention, "--no-cross-attention"),
        (cfg.base_layers > 0, "--base-layers"),
        (cfg.encoder.xformers_att_config or cfg.decoder.xformers_att_config, "xFormers attention"),
        (not (len(encoder.layers) and len(decoder.layers)), "no layers"),
        (weight.is_cuda and widest > WIDEST_HEAD, f"heads of more than {WIDEST_HEAD} channels"),
    ):
        if flag:
            return reason
    for name, module in model.named_modules():
        if has_forward_hooks(module):
            return f"a hook on {name or 'the model'}"
    known = (TransformerEncoderLayerBase, TransformerDecoderLayerBase, LayerwiseDecoderLayer)
    for layer in [*layers_of(encoder), *layers_of(decoder)]:
        if type(layer) not in known:
            return f"a layer of type {type(layer).__name__}"
        for part in SCALES:
            if getattr(layer, part, None) is not None:
                return f"a layer with {part}"
        if not hasattr(layer.self_attn.q_proj.weight, "flat_group"):  # copies lose it
            return "parameters that are copies"
    return None
