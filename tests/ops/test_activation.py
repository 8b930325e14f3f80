"""The hidden layer of a feed-forward on a CPU against the formula."""

import pytest
import torch
import torch.nn.functional as F

from surface_fusion.ops.activation import project_activate


def random(*shape: int) -> torch.Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=torch.Generator().manual_seed(sum(shape)))


@pytest.mark.parametrize("activation", [F.relu, F.gelu, torch.tanh])
def test_hidden_layer_equals_the_formula(activation) -> None:
    x, weight, bias = random(4, 3), random(5, 3), random(5)
    expected = activation(x @ weight.t() + bias)
    torch.testing.assert_close(project_activate(x, weight, bias, activation), expected)
    torch.manual_seed(0)
    dropped = project_activate(x, weight, bias, activation, rate=0.5)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], 2 * expected[kept])
    assert 0 < (expected != 0).sum() - kept.sum() < expected.numel()
