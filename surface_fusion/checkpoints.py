"""Which parameters of a checkpoint fit a model, and what is said about those that do not.

The published code allocates parameters that it never uses (a learned gate where the gate is fixed, linear
maps without ``--sf-linear``, the attention of mean and max); ours does not. A checkpoint of a plain
Transformer has none of the fusion's parameters.
"""

import logging
from typing import Any

from torch import Tensor

from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)

# Always there in a checkpoint of the published code, and how it is known.
PUBLISHED = ("decoder.meanmaxweight", "decoder.tgt_out_dim.weight", "decoder.src_out_dim.weight")

# Parameters that the published code adds to a Transformer, by the start of their names.
FUSION_PARAMETERS = (
    "decoder.sf_attn.",
    "decoder.fc1.",
    "decoder.fc2.",
    "decoder.tgt_out_dim.",
    "decoder.src_out_dim.",
    "decoder.meanmaxweight",
)
ENCODER_FUSION_PARAMETERS = (
    "decoder.ta_weight",
    "decoder.ta_final_layernorm.",
    "decoder.layer_positions",
    "encoder.layernorm_srcemb.",
)


def adapt_state_dict(model: Any, state_dict: dict[str, Tensor]) -> None:
    """Make *state_dict* fit *model*, in place, as far as that is honest.

    * parameters that the published code allocated and never used are dropped, with one log line;
    * those of a fused model are dropped by a plain one, with a warning;
    * a plain Transformer's checkpoint, which has no fusion parameter at all, keeps the model's fresh ones,
      with one log line.

    Raises:
        SurfaceFusionError: some fusion parameters are missing, some were trained but are not wanted, one
            has another shape, or the dictionaries differ in size.
    """
    wanted = model.state_dict()
    unused = [
        name
        for name in state_dict
        if name.startswith(FUSION_PARAMETERS + ENCODER_FUSION_PARAMETERS) and name not in wanted
    ]
    had_fusion = any(name.startswith(FUSION_PARAMETERS) for name in state_dict)
    # fc1 and fc2 are allocated where they are used; the attention also for mean and max.
    never_used = PUBLISHED if model.cfg.surfacefusion == "att" else (*PUBLISHED, "decoder.sf_attn.")
    published = all(name in state_dict for name in PUBLISHED)
    for name in unused:
        known = published and name.startswith(never_used + ENCODER_FUSION_PARAMETERS)
        if model.cfg.surfacefusion is not None and not known:
            raise _logged(
                f"the checkpoint was trained with fusion parameters that this model has no use for "
                f"({', '.join(unused)}); give the flags that it was trained with"
            )
    for name in unused:
        del state_dict[name]
    if unused and model.cfg.surfacefusion is None:
        logger.warning(
            f"dropped {len(unused)} parameters of surface fusion ({', '.join(unused)}): this model is a "
            "plain Transformer; if that is not meant, give the flags that the checkpoint was trained with"
        )
    elif unused:
        logger.info(
            f"dropped {len(unused)} parameters that the published code allocated but this model never uses "
            f"({', '.join(unused)}); to go on training from this checkpoint, add --reset-optimizer"
        )
    missing = [n for n in wanted if n.startswith(FUSION_PARAMETERS) and n not in state_dict]
    if missing and had_fusion:
        raise _logged(
            f"the checkpoint lacks the fusion parameters {', '.join(missing)}; give the flags that it was "
            "trained with"
        )
    if missing:
        logger.info(
            f"the checkpoint is a plain Transformer's: {len(missing)} fusion parameters keep their fresh "
            f"values ({', '.join(missing)})"
        )
        state_dict.update({name: wanted[name] for name in missing})
    _check_shapes(wanted, state_dict)


def _check_shapes(wanted: dict[str, Tensor], state_dict: dict[str, Tensor]) -> None:
    for side, name in (("source", "encoder"), ("target", "decoder")):
        key = f"{name}.embed_tokens.weight"
        if key in state_dict and len(state_dict[key]) != len(wanted[key]):
            raise _logged(
                f"the {side} dictionary has {len(wanted[key])} entries but the checkpoint was trained with "
                f"{len(state_dict[key])}; use the data folder (dict.*.txt) of its training"
            )
    for key, value in state_dict.items():
        if key in wanted and wanted[key].shape != value.shape:
            raise _logged(
                f"parameter {key} has shape {tuple(value.shape)} in the checkpoint and "
                f"{tuple(wanted[key].shape)} in the model; give the flags that it was trained with"
            )


def _logged(message: str) -> SurfaceFusionError:
    """The error, logged at once: fairseq's trainer replaces it by one that names nothing."""
    logger.error(message)
    return SurfaceFusionError(message)
