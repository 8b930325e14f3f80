"""Batches: load balancing over GPUs, and data workers that persist over epochs."""
