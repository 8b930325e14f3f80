"""The fused kernel against the formula, and the formula against numbers."""

import math

import pytest
import torch
from torch import Tensor

from surface_fusion.ops.adam import AdamOptions, fused_adam, plain_adam

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
OPTIONS = AdamOptions(lr=0.01, betas=(0.9, 0.98), eps=1e-3, weight_decay=0.1)


def tensors(dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    weights = torch.randn(1000, generator=generator, dtype=torch.float64).to(DEVICE, dtype)
    return weights, torch.zeros_like(weights), torch.zeros_like(weights)


def gradient(step: int, like: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(step)
    return torch.randn(1000, generator=generator, dtype=torch.float64).mul(10.0 ** -(step % 4)).to(like)


def test_update_of_one_number_computed_by_hand() -> None:
    weights, exp_avg, exp_avg_sq = (torch.tensor([x], dtype=torch.float64) for x in (2.0, 0.5, 0.25))
    plain_adam(weights, torch.tensor([3.0], dtype=torch.float64), exp_avg, exp_avg_sq, 2, OPTIONS)
    m, v = 0.9 * 0.5 + 0.1 * 3, 0.98 * 0.25 + 0.02 * 9
    assert exp_avg.item() == pytest.approx(m) and exp_avg_sq.item() == pytest.approx(v)
    step = 0.01 * math.sqrt(1 - 0.98**2) / (1 - 0.9**2) * m / (math.sqrt(v) + 1e-3)
    assert weights.item() == pytest.approx((1 - 0.01 * 0.1) * 2 - step)


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 3e-6)])
def test_the_fused_kernel_equals_the_formula(dtype: torch.dtype, tolerance: float) -> None:
    ours, theirs = tensors(dtype), tensors(dtype)
    for step in range(1, 50):
        grad = gradient(step, ours[0])
        plain_adam(ours[0], grad, *ours[1:], step, OPTIONS)
        fused_adam(theirs[0], grad, *theirs[1:], step, OPTIONS)
    for plain, fused in zip(ours, theirs, strict=True):
        torch.testing.assert_close(plain, fused, rtol=tolerance, atol=tolerance)
