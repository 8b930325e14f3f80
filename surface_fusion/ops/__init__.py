"""Operations and their Triton kernels; each has a plain torch implementation with the same results.

This package imports torch and triton only.
"""
