"""The optimizer ``flat_adam``."""
