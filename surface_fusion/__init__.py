"""Encoder layer fusion for fairseq: load with ``--user-dir surface_fusion``.

Importing the package registers the models and patches fairseq to run with current Python and torch
(``compat``).
"""

from surface_fusion.io.root_logger import root_logger_left_alone

with root_logger_left_alone():
    from surface_fusion import compat

compat.apply()

from surface_fusion.criterions import fused_label_smoothed_cross_entropy  # noqa: E402, F401
from surface_fusion.errors import SurfaceFusionError  # noqa: E402
from surface_fusion.models import architectures  # noqa: E402, F401
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel  # noqa: E402
from surface_fusion.optim import flat_adam  # noqa: E402, F401
from surface_fusion.version import __version__  # noqa: E402

__all__ = ["SurfaceFusionError", "SurfaceFusionModel", "__version__", "compat"]
