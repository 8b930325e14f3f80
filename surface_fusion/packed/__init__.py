"""Training without padding: forward and backward on packed rows, in CUDA graphs on a GPU."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
