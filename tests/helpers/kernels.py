"""Inputs and tolerances of the tests that compare a Triton kernel with torch."""

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import DEVICE

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
DTYPES = pytest.mark.parametrize("dtype", list(TOLERANCE))
RATE = 0.3
"""Rate of dropout."""


def random(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def gradients(out: list[Tensor], weights: list[Tensor], leaves: list[Tensor]) -> list[Tensor]:
    total = torch.stack([(x.float() * w).sum() for x, w in zip(out, weights, strict=True)]).sum()
    return list(torch.autograd.grad(total, leaves))


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    atol = TOLERANCE[dtype] * max(expected.abs().max().item(), 1)
    torch.testing.assert_close(got.float(), expected.float(), rtol=0, atol=atol)
