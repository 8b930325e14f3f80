"""The trainer of SurfaceFusion models, and what it does at the start of a training."""
