"""The fast path: same numbers as the plain modules, fewer kernels, less memory."""
