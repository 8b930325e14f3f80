"""Repairs of fairseq, applied when it is imported; ``repairs.py`` lists them. Nothing here is for speed."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
