"""Batches: load balancing, building them ahead of time, and collation."""
