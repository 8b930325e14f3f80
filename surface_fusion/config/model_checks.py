"""Check the values of the model's flags, and warn of flags without effect, before the model is built."""

import logging
import math
from collections.abc import Iterator
from dataclasses import fields
from typing import Any

from surface_fusion.config.ranges import RANGES, check_ranges
from surface_fusion.encoder_fusion import Combination, methods
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.ops.distributions import MODES

logger = logging.getLogger(__name__)

SOURCES = ("att", "mean", "max")  # values of --surfacefusion
FUSION_ONLY = ("sf_mode", "sf_gate", "sf_softmax_tau", "sf_renormalize", "sf_linear", "sf_idx")
"""Fields that have an effect only with ``--surfacefusion``."""


def check_model(cfg: Any) -> None:
    """Check *cfg*, a :class:`~surface_fusion.config.flags.SurfaceFusionConfig`.

    Raises:
        SurfaceFusionError: a value is invalid; the message says what to change.
    """
    for faults in (_number_faults, _model_faults, _encoder_fusion_faults, _surface_fusion_faults):
        for fault in faults(cfg):
            raise SurfaceFusionError(fault)
    for warning in _warnings(cfg):
        logger.warning(warning)


def _number_faults(cfg: Any) -> Iterator[str]:
    values = cfg.by_flag()
    for name, value in values.items():
        if name in RANGES and isinstance(value, str):
            yield f"--{name.replace('_', '-')} {value!r}: give a number"
    check_ranges(values)
    for stack in ("encoder", "decoder"):
        dim, learned = values[f"{stack}_embed_dim"], values[f"{stack}_learned_pos"]
        if dim < 4 and not learned and not cfg.no_token_positional_embeddings:
            yield f"--{stack}-embed-dim {dim} is too small for sinusoidal positions; give 4 or more"


def _model_faults(cfg: Any) -> Iterator[str]:
    encoder, decoder = cfg.encoder, cfg.decoder
    if vars(cfg).get("addtional_source_output") == "final":
        yield "--addtional-source-output final crashes in the published code and is unsupported; remove it"
    if cfg.target_word_dropout > 0 and decoder.input_dim != decoder.embed_dim:
        yield (
            f"--target-word-dropout needs --decoder-input-dim ({decoder.input_dim}) to equal "
            f"--decoder-embed-dim ({decoder.embed_dim})"
        )
    shared = cfg.share_decoder_input_output_embed or cfg.share_all_embeddings or cfg.merge_src_tgt_embed
    if shared and decoder.output_dim != decoder.embed_dim and cfg.adaptive_softmax_cutoff is None:
        yield (
            f"--decoder-output-dim {decoder.output_dim}: an output layer that shares the decoder's embedding "
            f"has its width, {decoder.embed_dim}; leave it out"
        )
    heads = [
        ("encoder", encoder.attention_heads, "encoder", encoder.embed_dim),
        ("decoder", decoder.attention_heads, "decoder", decoder.embed_dim),
    ]
    if cfg.surfacefusion == "att":
        heads.append(("sf", cfg.sf_attention_heads, "decoder", decoder.embed_dim))
    for name, count, stack, dim in heads:
        if count < 1 or dim % count:
            yield (
                f"--{name}-attention-heads {count} does not divide --{stack}-embed-dim {dim}; choose a "
                "number of heads that does"
            )
    if cfg.layer_wise_attention and encoder.layers < decoder.layers:
        yield (
            "--layer-wise-attention needs an encoder layer for each decoder layer, got "
            f"{encoder.layers} encoder and {decoder.layers} decoder layers"
        )


def _encoder_fusion_faults(cfg: Any) -> Iterator[str]:
    method, given = cfg.fusion_method, f"--encoder-fusion {cfg.encoder_fusion}"
    if cfg.encoder_fusion is None:
        return
    if method is None:
        known = ", ".join(methods())
        yield f"{given}: unknown, choose one of {known}, or import the module that registers it (--user-dir)"
    if cfg.no_cross_attention:
        yield f"{given} is for a decoder that attends to the encoder; leave out --no-cross-attention"
    if cfg.layer_wise_attention:
        yield f"--layer-wise-attention and {given} both say what the decoder attends to; leave one out"
    if method.adds_layers and cfg.extra_encoder_layers < 1:
        yield f"--extra-encoder-layers {cfg.extra_encoder_layers} adds nothing; give 1 or more"
    try:
        method.check_options(cfg.encoder.embed_dim, **cfg.fusion_options(method))
    except ValueError as error:
        yield str(error)
    for stack in ("encoder", "decoder"):
        if getattr(cfg, stack).layers < 1:
            yield f"{given} needs {stack} layers, got none"


def _surface_fusion_faults(cfg: Any) -> Iterator[str]:
    source, layers = cfg.surfacefusion, cfg.decoder.layers
    if source is None:
        return
    if source not in SOURCES:
        yield f"--surfacefusion {source}: unknown, choose one of {', '.join(SOURCES)}"
    if cfg.sf_mode not in MODES:
        yield f"--sf-mode {cfg.sf_mode}: unknown, choose one of {', '.join(MODES)}"
    if not 0 <= cfg.sf_gate <= 1:
        yield (
            f"--sf-gate {cfg.sf_gate} is outside [0, 1]; give the weight of the target branch, or 0 for a "
            "learned gate"
        )
    if not 0 <= cfg.sf_softmax_tau < math.inf:
        yield (
            f"--sf-softmax-tau {cfg.sf_softmax_tau} is not a valid factor; give a number of at least 0 (0: "
            "the surface logits have no effect)"
        )
    if cfg.sf_renormalize and not cfg.mode.gated:
        yield f"--sf-renormalize needs --sf-mode hard; {cfg.sf_mode} is normalised already: leave it out"
    if cfg.adaptive_softmax_cutoff is not None:
        yield (
            f"--adaptive-softmax-cutoff {cfg.adaptive_softmax_cutoff} cannot be used with --surfacefusion: "
            "both branches need the full output embedding; leave it out"
        )
    idx = -1 if cfg.sf_idx is None else cfg.sf_idx
    if source == "att" and layers < 1:
        yield (
            f"--surfacefusion att with --decoder-layers {layers}: its query is the output of a decoder "
            "layer; give 1 or more layers, or use mean or max"
        )
    if source == "att" and not -layers <= idx < layers:
        yield (
            f"--sf-idx {idx} is out of range for {layers} decoder layers; give a value from {-layers} to "
            f"{layers - 1}"
        )
    if source != "att" and cfg.encoder.embed_dim != cfg.decoder.output_dim:
        yield (
            f"--surfacefusion {source} needs --encoder-embed-dim ({cfg.encoder.embed_dim}) to equal "
            f"--decoder-output-dim ({cfg.decoder.output_dim}); use att or equal sizes"
        )


def _warnings(cfg: Any) -> Iterator[str]:
    name, method, inside = cfg.encoder_fusion, cfg.fusion_method, methods(Combination)
    for flag, useful in (
        ("encoder_fusion_embedding", method is not None and not method.adds_layers and name not in inside),
        ("no_encoder_fusion_embedding", name in inside),
        ("encoder_fusion_options", name is not None),
    ):
        if getattr(cfg, flag) and not useful:
            reason = f"with --encoder-fusion {name}" if name else "since --encoder-fusion is not given"
            yield f"--{flag.replace('_', '-')}: without effect {reason}"
    untrained = cfg.encoder.layers - cfg.decoder.layers
    key_is_trained = cfg.surfacefusion == "att" and cfg.sf_no_detach
    if cfg.layer_wise_attention and untrained and not key_is_trained:
        yield (
            f"--layer-wise-attention: no decoder layer attends to the last {untrained} encoder layers, they "
            "are not trained"
        )
    unused = [f.name for f in fields(cfg) if f.name in FUSION_ONLY and getattr(cfg, f.name) != f.default]
    if cfg.surfacefusion is None and unused:
        flags = ", ".join("--" + name.replace("_", "-") for name in unused)
        yield f"{flags}: no effect without --surfacefusion"
