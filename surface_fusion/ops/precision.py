"""The precision of sums and softmaxes: float32 for float16 and bfloat16, otherwise that of the input."""

import torch
from torch import Tensor


def accumulation_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which to sum values of *dtype*: float32, or float64 for float64."""
    return torch.promote_types(dtype, torch.float32)


def at_least_float32(x: Tensor) -> Tensor:
    """Cast *x* to float32; float64 stays float64."""
    return x.to(accumulation_dtype(x.dtype))
