"""Repairs of fairseq, applied when it is imported; ``repairs.py`` applies them. Nothing here is for speed.

"fs 5610" is issue 5610 of facebookresearch/fairseq.
"""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
