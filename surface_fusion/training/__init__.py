"""The trainer of SurfaceFusion models, its cached settings, and checks at the start of a training."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
