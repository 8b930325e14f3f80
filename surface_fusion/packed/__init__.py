"""Training without padding: forward and backward on packed rows, in CUDA graphs on a GPU."""
