"""The kernel of ReLU's backward against torch: on a GPU, or in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from surface_fusion.ops.activation import project_activate
from tests.helpers.interpreter import (
    assert_passes_in_the_interpreter,
    runs_here,
    starts_the_interpreter,
)
from tests.helpers.kernels import DTYPES, RATE, assert_near, gradients, random


@starts_the_interpreter
def test_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    assert_passes_in_the_interpreter(pytestconfig, __file__)


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each program processes several blocks of rows."""
    from surface_fusion.ops import activation_triton

    monkeypatch.setattr(activation_triton, "PROGRAMS", 2)


@runs_here
@pytest.mark.usefixtures("few_programs")
@DTYPES
@pytest.mark.parametrize("rate", [0.0, RATE])
@pytest.mark.parametrize("rows, dim", [(1, 20), (37, 600), (130, 96)])
def test_hidden_layer_equals_torch(rows: int, dim: int, rate: float, dtype: torch.dtype) -> None:
    x, weight, bias = (
        random(*shape, seed=i).to(dtype) for i, shape in enumerate([(rows, 6), (dim, 6), (dim,)])
    )
    leaves = [t.requires_grad_() for t in (x, weight, bias)]
    exact = [t.detach().float().requires_grad_() for t in leaves]
    torch.manual_seed(0)
    got = project_activate(*leaves, F.relu, rate)
    before = F.linear(*exact)
    kept = got != 0
    if rows > 1:
        assert kept[before > 1e-2].float().mean().item() == pytest.approx(1 - rate, abs=0.05)
    expected = before.relu() * kept / (1 - rate)
    assert got.dtype == dtype
    assert_near(got, expected, dtype)
    weights = [random(rows, dim, seed=7) * (before.detach().abs() > 1e-2)]  # no element at the kink
    pairs = zip(gradients([got], weights, leaves), gradients([expected], weights, exact), strict=True)
    for a, b in pairs:
        assert a.dtype == dtype
        assert_near(a, b, dtype)
