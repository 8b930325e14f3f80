"""The criterion ``fused_label_smoothed_cross_entropy``."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
