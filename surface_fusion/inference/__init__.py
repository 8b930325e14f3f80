"""Translate text with a trained model."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
