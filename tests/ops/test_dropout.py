"""Dropout on a CPU: the rate, independence of neighbours, and the gradient."""

import pytest
import torch

from surface_fusion.ops.dropout import dropout


def test_a_rate_of_zero_draws_no_random_numbers() -> None:
    x = torch.ones(3, 3)
    before = torch.get_rng_state()
    assert dropout(x, 0.0) is x
    assert torch.get_rng_state().equal(before)


def test_the_rate_on_a_cpu() -> None:
    torch.manual_seed(0)
    x = torch.ones(1000, 1003, requires_grad=True)
    y = dropout(x, 0.3)
    values, counts = y.unique(return_counts=True)
    torch.testing.assert_close(values, torch.tensor([0.0, 1 / 0.7]))
    assert counts[1].item() / x.numel() == pytest.approx(0.7, abs=0.002)  # four deviations
    # Neighbours, which share a draw, are independent.
    kept = (y.detach() > 0).double() - 0.7
    for shift in (1, 2, 3, 4):
        assert (kept.flatten()[shift:] * kept.flatten()[:-shift]).mean().abs() < 0.001
    y.sum().backward()
    assert x.grad.equal(y.detach())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_other_dtypes_on_a_cpu(dtype: torch.dtype) -> None:
    y = dropout(torch.ones(7, dtype=dtype), 0.5)
    assert y.dtype == dtype and set(y.tolist()) <= {0.0, 2.0}
    assert dropout(torch.ones(7, dtype=dtype), 1.0).eq(0).all()
