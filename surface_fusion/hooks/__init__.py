"""Make fairseq use our trainer and our sequence generators, by replacing one attribute of it for each.

With ``--sf-plain``, and for other models, both return fairseq's own classes.
"""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
