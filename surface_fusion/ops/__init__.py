"""Operations (``NAME.py``), their Triton kernels (``NAME_triton.py``), and helpers.

An operation runs in plain torch where its kernels do not. This package imports torch and triton only.
"""
