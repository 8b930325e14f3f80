"""The flags: a field of a dataclass is a flag, a YAML key and a line of ``--help``."""
