"""Deprecated path of ``SurfaceFusionModel``; will be removed after release 0.2."""

import warnings

from surface_fusion.models.transformer_surface_fusion import MODEL_NAME, SurfaceFusionModel

__all__ = ["MODEL_NAME", "SurfaceFusionModel"]

warnings.warn(
    "surface_fusion.model is deprecated; use `from surface_fusion import SurfaceFusionModel`",
    DeprecationWarning,
    stacklevel=2,
)
