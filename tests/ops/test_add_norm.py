"""What surrounds a layer's products, as torch has it."""

import pytest
import torch
import torch.nn.functional as F

from surface_fusion.ops.add_norm import drop, project_activate, project_add_norm
from tests.helpers.interpreter import INTERPRETED


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


@pytest.mark.parametrize("activation", [F.relu, F.gelu, torch.tanh])
def test_hidden_layer(activation) -> None:
    x, weight, bias = random(4, 3), random(5, 3), random(5)
    expected = activation(x @ weight.t() + bias)
    torch.testing.assert_close(project_activate(x, weight, bias, activation), expected)
    torch.manual_seed(0)
    dropped = project_activate(x, weight, bias, activation, rate=0.5)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * expected[kept])
    assert 0 < (expected != 0).sum() - kept.sum() < expected.numel()


def test_without_a_rate_nothing_is_drawn() -> None:
    x = random(3, 3)
    before = torch.get_rng_state()
    assert drop(x, 0.0) is x
    assert torch.get_rng_state().equal(before)


def test_float64_never_goes_to_the_kernels() -> None:
    """Nor would anything else here: they need a GPU, or Triton's interpreter."""
    from surface_fusion.ops.backend import use_kernels

    assert not use_kernels(torch.zeros(1, dtype=torch.float64))
    assert use_kernels(torch.zeros(1)) == INTERPRETED


def test_dropout_on_a_cpu_keeps_as_many_as_it_says() -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, 1003, requires_grad=True)
    y = drop(x, 0.3)
    values, counts = y.unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.7]))
    assert counts[1].item() / x.numel() == pytest.approx(0.7, abs=0.002)  # four deviations
    # Neighbours, which share a draw, know nothing of each other.
    kept = (y.detach() > 0).double() - 0.7
    for shift in (1, 2, 3, 4):
        assert (kept.flatten()[shift:] * kept.flatten()[:-shift]).mean().abs() < 0.001
    y.sum().backward()
    assert x.grad.equal(y.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_dropout_on_a_cpu_in_other_dtypes(dtype: torch.dtype) -> None:
    y = drop(torch.ones(7, dtype=dtype), 0.5)
    assert y.dtype == dtype and set(y.tolist()) <= {0.0, 2.0}
    assert drop(torch.ones(7, dtype=dtype), 1.0).eq(0).all()
