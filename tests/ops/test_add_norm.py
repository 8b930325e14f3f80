"""The end of a sublayer on a CPU against the formula."""

import pytest
import torch

from surface_fusion.ops.add_norm import project_add_norm


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


def test_a_sublayer_ends_in_residual_and_norm() -> None:
    x, weight, bias, residual = random(4, 3), random(5, 3), random(5), random(4, 5)
    norm = random(5) + 1, random(5)
    s, y = project_add_norm(x, (weight, bias), residual, (*norm, 1e-3))
    torch.testing.assert_close(s, residual + x @ weight.t() + bias)
    normed = (s - s.mean(1, keepdim=True)) / (s.var(1, keepdim=True, unbiased=False) + 1e-3).sqrt()
    torch.testing.assert_close(y, normed * norm[0] + norm[1])


def test_only_the_sublayer_is_dropped_not_the_residual() -> None:
    torch.manual_seed(0)
    residual, ones = random(300, 5), torch.ones(5, dtype=torch.float64)
    zeros = torch.zeros(5, 5, dtype=torch.float64), ones
    s, _ = project_add_norm(residual, zeros, residual, (ones, ones, 1e-5), rate=0.2)
    added = s - residual
    kept = added.abs() > 1e-9
    torch.testing.assert_close(added[kept], torch.full_like(added[kept], 1 / 0.8))
    assert kept.double().mean().item() == pytest.approx(0.8, abs=0.04)
