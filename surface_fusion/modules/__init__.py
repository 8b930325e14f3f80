"""Layers, and functions of layers, that encoder and decoder are built from."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
