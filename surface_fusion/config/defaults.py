"""Fill in the missing fields of every configuration, and translate the flags of old checkpoints."""

from dataclasses import fields
from typing import Any

from fairseq.models.transformer import TransformerConfig
from omegaconf import DictConfig

from surface_fusion.config.encoder_fusion_flags import normalise_encoder_fusion
from surface_fusion.config.flags import SECTIONS, SurfaceFusionConfig
from surface_fusion.errors import SurfaceFusionError


def flatten_sections(args: Any) -> None:
    """Turn ``encoder: {layers: 3}`` of a YAML config into ``encoder_layers``, which architectures read."""
    if isinstance(args, DictConfig):
        for section in SECTIONS:
            for name, value in (args.pop(section, None) or {}).items():
                args[f"{section}_{name}"] = value


def fill_defaults(args: Any) -> None:
    """Set each SurfaceFusion field that *args* lacks, and translate the published code's settings.

    *args* is the Namespace of a command line or an old checkpoint, or a YAML config. The function is
    idempotent, so a checkpoint stores the settings that were trained:

    * ``--sf-ffn`` and ``--sf-no-posedemb`` are on by default, as on the published command line.
    * Checkpoints of the published code are recognised by the misspelt ``sf_fuision_mode``. They pooled over
      ids >= 50, and some have only the misspelt name of the mode.
    * In the published code, ``--ta-posedemb`` also adds positions to the surface, and layer 0 of layer
      attention has positions if the surface has them.

    Raises:
        SurfaceFusionError: a checkpoint of the published code computes something that is not supported.
    """
    published = hasattr(args, "sf_fuision_mode")
    if published:
        args.sf_mode = getattr(args, "sf_mode", args.sf_fuision_mode)
        args.sf_pool_published = getattr(args, "sf_pool_published", True)
        _normalise_published_positions(args)
    inherited = {f.name for f in fields(TransformerConfig)}
    for f in fields(SurfaceFusionConfig):
        if f.name not in inherited and not hasattr(args, f.name):
            setattr(args, f.name, f.default)
    normalise_encoder_fusion(args, published)
    if args.sf_ffn is None or args.no_sf_ffn:
        args.sf_ffn = not args.no_sf_ffn
    if args.sf_no_posedemb is None or args.sf_posedemb:
        args.sf_no_posedemb = not args.sf_posedemb


def _normalise_published_positions(args: Any) -> None:
    if getattr(args, "ta_posedemb", False):
        if getattr(args, "layernorm_embedding", False) and args.sf_no_posedemb:
            raise SurfaceFusionError(
                "the checkpoint was trained by the published code with --ta-posedemb and "
                "--layernorm-embedding, which adds positions to the source embeddings without normalising "
                "them; this is not supported"
            )
        args.sf_no_posedemb = False  # also without transparent attention
    elif getattr(args, "transparent_attention", False) and not getattr(args, "sf_no_posedemb", True):
        args.ta_posedemb = True
