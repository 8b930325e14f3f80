"""The kernels of a sublayer's end against torch: on a GPU, or in the interpreter."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.ops import add_norm
from surface_fusion.ops.add_norm import project_add_norm
from tests.helpers.interpreter import (
    DEVICE,
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
    from surface_fusion.ops import add_norm_triton

    monkeypatch.setattr(add_norm_triton, "PROGRAMS", 4)


def end_of_sublayer(rows: int, dim: int, dtype: torch.dtype) -> list[Tensor]:
    """x, W, its bias, residual, and LayerNorm's weight and bias; rounded to *dtype*."""
    shapes = ((rows, 6), (dim, 6), (dim,), (rows, dim), (dim,), (dim,))
    values = [random(*shape, seed=i) for i, shape in enumerate(shapes)]
    values[4] += 1
    return [x.to(dtype) for x in values]


def plain(leaves: list[Tensor], kept: Tensor | float = 1.0) -> tuple[Tensor, Tensor]:
    """The formula; *kept* is the factor of dropout."""
    x, weight, bias, residual, norm_weight, norm_bias = leaves
    s = residual + F.linear(x, weight, bias) * kept
    return s, F.layer_norm(s, norm_weight.shape, norm_weight, norm_bias, 1e-3)


def kernels(leaves: list[Tensor], rate: float = 0.0, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    x, weight, bias, residual, norm_weight, norm_bias = leaves
    norm = norm_weight, norm_bias, 1e-3
    return project_add_norm(x, (weight, bias), residual, norm, rate, seed)


USED = {"both": slice(0, 2), "sum": slice(0, 1), "normed": slice(1, 2)}
"""Pre-norm reads both results, post-norm the normalised one; a last sublayer may leave only the sum."""


@runs_here
@pytest.mark.usefixtures("few_programs")
@DTYPES
@pytest.mark.parametrize("used", USED)
@pytest.mark.parametrize("rows, dim", [(9, 20), (1, 96), (41, 512), (450, 40)])
def test_residual_and_norm_equal_torch(rows: int, dim: int, used: str, dtype: torch.dtype) -> None:
    leaves = [x.requires_grad_() for x in end_of_sublayer(rows, dim, dtype)]
    exact = [x.detach().float().requires_grad_() for x in leaves]
    got, expected = kernels(leaves), plain(exact)
    weights = [random(rows, dim, seed=7), random(rows, dim, seed=8)]
    if used == "sum":  # not through LayerNorm
        leaves, exact = leaves[:4], exact[:4]
    for a, b in zip(
        [*got, *gradients(got[USED[used]], weights[USED[used]], leaves)],
        [*expected, *gradients(expected[USED[used]], weights[USED[used]], exact)],
        strict=True,
    ):
        assert a.dtype == dtype
        assert_near(a, b, dtype)


def kept_at_the_end(rows: int, dim: int, seed: Tensor) -> Tensor:
    """Which elements are kept: where nothing but the bias, 1, is added to a residual of 0."""
    zeros, ones = torch.zeros(rows, dim, device=DEVICE), torch.ones(dim, device=DEVICE)
    s, _ = kernels([zeros, torch.zeros(dim, dim, device=DEVICE), ones, zeros, ones, ones], RATE, seed)
    torch.testing.assert_close(s[s != 0], torch.full_like(s[s != 0], 1 / (1 - RATE)))
    return s != 0


@runs_here
@pytest.mark.usefixtures("few_programs")
@pytest.mark.parametrize("used", USED)
def test_backward_uses_the_dropout_mask_of_forward(used: str) -> None:
    rows, dim = 450, 40
    seeds = torch.tensor([3, 3, 4], dtype=torch.int32, device=DEVICE)
    kept, same, different = (kept_at_the_end(rows, dim, seed) for seed in seeds)
    assert kept.equal(same)
    assert kept.float().mean().item() == pytest.approx(1 - RATE, abs=0.02)
    assert (kept & different).float().mean().item() == pytest.approx((1 - RATE) ** 2, abs=0.02)
    leaves = [x.requires_grad_() for x in end_of_sublayer(rows, dim, torch.float32)]
    got, expected = kernels(leaves, RATE, seeds[0]), plain(leaves, kept / (1 - RATE))
    weights = [random(rows, dim, seed=7), random(rows, dim, seed=8)]
    if used == "sum":
        leaves = leaves[:4]
    for a, b in zip(
        [*got, *gradients(got[USED[used]], weights[USED[used]], leaves)],
        [*expected, *gradients(expected[USED[used]], weights[USED[used]], leaves)],
        strict=True,
    ):
        assert_near(a, b, torch.float32)


@runs_here
def test_strided_residual_and_expanded_gradient() -> None:
    leaves = end_of_sublayer(9, 20, torch.float32)
    leaves[3] = random(20, 9).t()
    leaves = [x.requires_grad_() for x in leaves]
    for loss in (lambda s, y: s.sum(), lambda s, y: (s * y.t().reshape(9, 20)).sum()):
        inputs = leaves[:4]
        a, b = (torch.autograd.grad(loss(*f(leaves)), inputs) for f in (kernels, plain))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@runs_here
def test_rows_too_wide_for_the_kernels_use_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(add_norm, "WIDEST_ROW", 19)
    monkeypatch.setattr(add_norm._AddNorm, "apply", None)
    leaves = end_of_sublayer(9, 20, torch.float32)
    torch.testing.assert_close(kernels(leaves), plain(leaves))
