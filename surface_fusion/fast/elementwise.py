"""What lies between the products of a Transformer layer, each one pass over the rows on a GPU."""

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor


def drop(x: Tensor, rate: float) -> Tensor:
    """Dropout in training."""
    return F.dropout(x, rate) if rate > 0 else x


def add_and_norm(
    x: Tensor, residual: Tensor, weight: Tensor, bias: Tensor, *, rate: float, eps: float
) -> tuple[Tensor, Tensor]:
    """``s = residual + dropout(x)`` and ``LayerNorm(s)``, N x C each."""
    s = residual + drop(x, rate)
    return s, F.layer_norm(s, weight.shape, weight, bias, eps)


def activate(x: Tensor, activation: Callable[[Tensor], Tensor], rate: float) -> Tensor:
    """``dropout(activation(x))``."""
    return drop(activation(x), rate)
