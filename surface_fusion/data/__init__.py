"""Batches: load balancing over GPUs, and data workers that persist over epochs."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
