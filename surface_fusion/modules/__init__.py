"""Layers of encoder and decoder, the cached list of a model's modules, and the loss of padded batches."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
