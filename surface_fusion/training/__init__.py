"""The trainer of SurfaceFusion models, and what it does at the start of a training."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
