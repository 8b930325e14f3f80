"""Decide where Triton kernels run: on NVIDIA GPUs, and in Triton's interpreter for their tests."""

import importlib.util
import os

import torch
from torch import Tensor

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_kernels(x: Tensor) -> bool:
    """Whether to use Triton kernels for *x*; otherwise use plain torch."""
    return INSTALLED and (x.is_cuda or INTERPRETED) and x.dtype != torch.float64
