"""Adapt checkpoints of the published code and of plain Transformers to a model.

The published code allocates parameters that it never uses: a learned gate when the gate is fixed, linear
maps without ``--sf-linear``, attention for mean and max. This package does not allocate them.
"""

import logging
from typing import Any

from torch import Tensor

from surface_fusion.encoder_fusion.extra_layers import start_layers_as_plain
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)

# Every checkpoint of the published code has these parameters; they identify it.
PUBLISHED = ("decoder.meanmaxweight", "decoder.tgt_out_dim.weight", "decoder.src_out_dim.weight")

# Name prefixes of the parameters that surface fusion adds to a Transformer.
FUSION_PARAMETERS = (
    "decoder.sf_attn.",
    "decoder.fc1.",
    "decoder.fc2.",
    "decoder.tgt_out_dim.",
    "decoder.src_out_dim.",
    "decoder.meanmaxweight",
)
# Transparent attention: published parameter name -> name in this package.
PUBLISHED_LAYER_ATTENTION = {
    "decoder.ta_weight": "encoder.fusion.weight",
    "decoder.ta_final_layernorm.": "encoder.fusion.layer_norm.",
    "encoder.layernorm_srcemb.": "encoder.fusion.embedding_norm.",
    "encoder.fc1.": "encoder.fusion.fc1.",
    "encoder.fc2.": "encoder.fusion.fc2.",
    "encoder.layernorm_allsource.": "encoder.fusion.ffn_norm.",
}
NORM_FIRST = "encoder.fusion.ffn_norm_first"
"""A buffer of pre-norm models with ``--ta-ffn``; models of version 0.1.0 lack it."""

OUR_ENCODER_FUSION = ("encoder.fusion.", "encoder.combination.", "decoder.combination.")
PUBLISHED_ENCODER_FUSION = (*PUBLISHED_LAYER_ATTENTION, "decoder.layer_positions")
ENCODER_FUSION_PARAMETERS = OUR_ENCODER_FUSION + PUBLISHED_ENCODER_FUSION


def adapt_state_dict(model: Any, state_dict: dict[str, Tensor]) -> None:
    """Adapt *state_dict* to *model*, in place.

    * Renames parameters of the published code, and drops those that it allocated but never used.
    * Drops the fusion parameters if *model* is a plain Transformer; logs a warning.
    * Keeps the model's initial fusion parameters if the checkpoint has none of surface fusion or of encoder
      layer fusion. If the method allows it, the model then initially equals the plain Transformer.

    Raises:
        SurfaceFusionError: some but not all fusion parameters are missing, trained parameters have no
            counterpart in the model, a shape differs, or the sizes of the dictionaries differ.
    """
    expected = model.state_dict()
    if model.cfg.memory_per_layer:
        _rename_layer_attention(state_dict, expected)
    _drop_unused(model.cfg, state_dict, expected)
    extra = tuple(f"encoder.layers.{i}." for i in model.cfg.extra_layer_numbers)
    for family, names, start_as_plain in (
        ("surface", FUSION_PARAMETERS, lambda: model.decoder.start_as_plain()),
        ("encoder layer", OUR_ENCODER_FUSION + extra, lambda: _start_encoder_as_plain(model)),
    ):
        missing = [n for n in expected if n.startswith(names) and n not in state_dict]
        if not missing:
            continue
        if any(n.startswith(names) for n in state_dict):
            raise _logged(
                f"the checkpoint lacks the fusion parameters {', '.join(missing)}; give the flags that it "
                "was trained with"
            )
        start_as_plain()
        logger.info(
            f"the checkpoint has no {family} fusion: {len(missing)} fusion parameters keep their initial "
            f"values ({', '.join(missing)})"
        )
        state_dict.update({name: expected[name] for name in missing})
    _check_shapes(expected, state_dict)


def _start_encoder_as_plain(model: Any) -> None:
    fusion = getattr(model.encoder, "fusion", None)
    if fusion is not None:
        fusion.start_as_plain()
    start_layers_as_plain(model.encoder.layers[i] for i in model.cfg.extra_layer_numbers)


def _rename_layer_attention(state_dict: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    """Rename the published code's parameters of transparent attention; refuse those of version 0.1.0."""
    published_ffn = any(name.startswith("encoder.layernorm_allsource.") for name in state_dict)
    if NORM_FIRST in expected and published_ffn:
        state_dict[NORM_FIRST] = expected[NORM_FIRST]
    for name in list(state_dict):
        for old, new in PUBLISHED_LAYER_ATTENTION.items():
            if name.startswith(old):
                state_dict[new + name[len(old) :]] = state_dict.pop(name)
    has_ffn = any(name.startswith("encoder.fusion.ffn_norm.") for name in state_dict)
    if NORM_FIRST in expected and has_ffn and NORM_FIRST not in state_dict:
        raise _logged(
            "the checkpoint was trained by surface-fusion 0.1.0 with --ta-ffn and "
            "--encoder-normalize-before; its LayerNorm follows the feed-forward layer, here it precedes it, "
            "as in the published code; train again, or use version 0.1.0"
        )


def _drop_unused(cfg: Any, state_dict: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    names = FUSION_PARAMETERS + ENCODER_FUSION_PARAMETERS
    unused = [name for name in state_dict if name.startswith(names) and name not in expected]
    if not unused:
        return
    # The published code allocates fc1 and fc2 only if they are used, but the attention also for mean and max.
    never_used = PUBLISHED + PUBLISHED_ENCODER_FUSION
    if cfg.surfacefusion != "att":
        never_used += ("decoder.sf_attn.",)
    if cfg.surfacefusion is None:
        never_used += FUSION_PARAMETERS  # in the published code only gate 1 disables surface fusion
    published = all(name in state_dict for name in PUBLISHED)
    plain = cfg.surfacefusion is None and cfg.encoder_fusion is None
    if not plain and not (published and all(name.startswith(never_used) for name in unused)):
        raise _logged(
            f"the checkpoint was trained with fusion parameters that this model does not use "
            f"({', '.join(unused)}); give the flags that it was trained with"
        )
    for name in unused:
        del state_dict[name]
    if plain:
        logger.warning(
            f"dropped {len(unused)} fusion parameters ({', '.join(unused)}): this model is a plain "
            "Transformer; if this is not intended, give the flags that the checkpoint was trained with"
        )
    else:
        logger.info(
            f"dropped {len(unused)} parameters that the published code allocated but this model never uses "
            f"({', '.join(unused)}); to continue training from this checkpoint, add --reset-optimizer"
        )


def _check_shapes(expected: dict[str, Tensor], state_dict: dict[str, Tensor]) -> None:
    for side, name in (("source", "encoder"), ("target", "decoder")):
        key = f"{name}.embed_tokens.weight"
        if key in state_dict and len(state_dict[key]) != len(expected[key]):
            raise _logged(
                f"the {side} dictionary has {len(expected[key])} entries but the checkpoint was trained with "
                f"{len(state_dict[key])}; use the data folder (dict.*.txt) of its training"
            )
    for key, value in state_dict.items():
        if key in expected and expected[key].shape != value.shape:
            raise _logged(
                f"parameter {key} has shape {tuple(value.shape)} in the checkpoint and "
                f"{tuple(expected[key].shape)} in the model; give the flags that it was trained with"
            )


def _logged(message: str) -> SurfaceFusionError:
    """Log the error and return it: fairseq's trainer replaces the exception by one without the reason."""
    logger.error(message)
    return SurfaceFusionError(message)
