"""Where our Triton kernels run: on NVIDIA GPUs, and in Triton's interpreter for their tests."""

import importlib.util
import os

import torch
from torch import Tensor

INSTALLED = importlib.util.find_spec("triton") is not None
INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def use_kernels(x: Tensor) -> bool:
    """Whether kernels are to work on *x*; plain torch does otherwise."""
    return INSTALLED and (x.is_cuda or INTERPRETED) and x.dtype != torch.float64
