"""Incremental decoding and beam search on the device."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
