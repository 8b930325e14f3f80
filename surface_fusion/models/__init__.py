"""``transformer_surface_fusion``: the model, its encoder, decoder and named architectures."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
