"""The attributes of fairseq that are replaced for speed: one that makes trainers, one that makes generators.

With ``--sf-plain``, and for other models, both return fairseq's own classes.
"""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
