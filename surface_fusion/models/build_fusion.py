"""Build the modules of encoder layer fusion from a ``SurfaceFusionConfig``."""

import copy
import functools
from typing import Any

from fairseq import utils
from fairseq.modules import FairseqDropout

from surface_fusion.encoder_fusion import Combination, EncoderFusion, FusionMethod, methods


def build_fusion(cfg: Any) -> FusionMethod | None:
    """Build the module that fuses the encoder's states, or None if the method has none."""
    method: Any = cfg.fusion_method
    if method is None or method.adds_layers or issubclass(method, Combination):
        return None
    encoder, embedding = cfg.encoder, cfg.encoder_fusion_embedding
    states, options = encoder.layers + embedding, cfg.fusion_options(method)
    if issubclass(method, EncoderFusion):
        return method(states, encoder.embed_dim, **options)
    return method(
        states,
        encoder.embed_dim,
        cfg.decoder.layers,
        embedding=embedding,
        embedding_dropout=0.0 if cfg.ta_posedemb else cfg.dropout,  # the encoder's input has been dropped out
        embedding_norm=embedding and not cfg.no_ta_embnorm and not encoder.normalize_before,
        dropout=cfg.ta_dropout,
        dropconnect=cfg.ta_dropconnect,
        ffn_dim=encoder.ffn_embed_dim if cfg.ta_ffn else 0,
        ffn_dropout=cfg.dropout,
        activation_dropout=float(cfg.activation_dropout),
        activation=utils.get_activation_fn(str(cfg.activation_fn)),
        normalize_before=encoder.normalize_before,
        # --retain-dropout-modules finds dropout by the name of its stack.
        make_dropout=functools.partial(FairseqDropout, module_name="TransformerEncoder"),
        **options,
    )


def build_combination(cfg: Any, stack: Any, dim: int) -> Combination | None:
    """Build the combination for the layers of *stack*, a section of *cfg*, or None if the method has none."""
    method: Any = methods(Combination).get(cfg.encoder_fusion)
    if method is None:
        return None
    embedding = not cfg.no_encoder_fusion_embedding
    return method(stack.layers, dim, stack.normalize_before, embedding, **cfg.fusion_options(method))


def with_extra_layers(cfg: Any) -> Any:
    """Return *cfg*, or a copy whose encoder includes the layers that its method adds."""
    extra = len(cfg.extra_layer_numbers)
    if extra:
        cfg = copy.deepcopy(cfg)
        cfg.encoder.layers += extra
    return cfg
