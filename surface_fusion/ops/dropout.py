"""Dropout: ``x mask / (1 - rate)``, where mask is 1 with probability 1 - rate and else 0; any shape.

On a GPU it is torch's own. On a CPU torch draws a double per element, which takes as long as a matrix
product. This draws 16 bits, so the rate is exact to 1/65,536. Kernels that include dropout draw their masks
by ``dropout_triton.py``. Tested by statistics of the masks.
"""

import math

import torch
import torch.nn.functional as F
from torch import Tensor


def dropout(x: Tensor, rate: float) -> Tensor:
    """Apply dropout to *x*; return *x* itself if *rate* is 0."""
    if rate <= 0:
        return x
    if x.is_cuda or rate >= 1:
        return F.dropout(x, rate)
    draws = torch.empty(math.ceil(x.numel() / 4), dtype=torch.int64).random_(-(2**63), None)
    bits = draws.view(torch.int16)[: x.numel()].view(x.shape)
    return x * (bits >= round(rate * 2**16) - 2**15).to(x.dtype).mul_(1 / (1 - rate))
