"""The optimizer ``flat_adam``."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
