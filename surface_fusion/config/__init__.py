"""The flags: a field of a dataclass is a flag, a YAML key and a line of ``--help``."""

import fairseq  # noqa: F401  (registers this package, see surface_fusion/__init__.py)
