"""Dropout masks are uniform, and independent between neighbours, seeds and heads."""

import pytest
import torch
from torch import Tensor

from tests.helpers.interpreter import (
    DEVICE,
    assert_passes_in_the_interpreter,
    runs_here,
    starts_the_interpreter,
)

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from surface_fusion.ops.dropout_triton import keep  # noqa: E402

SIZE = 256
HEAD = 0x632BE59B  # what attention adds to the seed for each head


@triton.jit
def _keep_kernel(out, seed, rate, SIZE: tl.constexpr):
    cols = tl.arange(0, SIZE)
    rows = tl.program_id(0) * 64 + tl.arange(0, 64)
    kept = keep(tl.load(seed), rows[:, None], cols[None, :], rate)
    tl.store(out + rows[:, None] * SIZE + cols[None, :], kept.to(tl.float32))


def kept(seed: int, rate: float) -> Tensor:
    """SIZE x SIZE of 0 and 1."""
    out = torch.full((SIZE, SIZE), float("nan"), device=DEVICE)
    seed = (seed + 2**31) % 2**32 - 2**31
    _keep_kernel[(SIZE // 64,)](out, torch.tensor(seed, dtype=torch.int32, device=DEVICE), rate, SIZE)
    return out.cpu()


def correlation(a: Tensor, b: Tensor) -> float:
    """Correlation of two masks, in standard deviations of that of independent masks."""
    return torch.corrcoef(torch.stack([a.flatten(), b.flatten()]))[0, 1].item() * a.numel() ** 0.5


@starts_the_interpreter
def test_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    assert_passes_in_the_interpreter(pytestconfig, __file__)


@runs_here
@pytest.mark.parametrize("seed", [0, 1, 2**31 - 1])
def test_random_numbers_are_uniform(seed: int) -> None:
    """The hash is uniform: masks of 15 rates count how often it is in each sixteenth of its range."""
    counts = torch.tensor([kept(seed, i / 16).sum().item() for i in range(17)])
    in_each = -counts.diff()
    expected = SIZE * SIZE / 16
    chi_square = ((in_each - expected) ** 2 / expected).sum().item()
    assert 2 < chi_square < 40  # 15 degrees of freedom: outside once in 10,000
    assert counts[0] == SIZE * SIZE and counts[16] == 0


@runs_here
def test_rows_and_columns_are_kept_at_the_rate() -> None:
    mask = kept(7, 0.1)
    for axis in (0, 1):
        scores = (mask.mean(axis) - 0.9) / (0.9 * 0.1 / SIZE) ** 0.5
        assert scores.abs().max() < 5
        assert scores.square().mean().item() == pytest.approx(1, abs=0.4)  # neither clustered nor too regular


@runs_here
@pytest.mark.parametrize("rate", [0.1, 0.5])
def test_neighbours_seeds_and_heads_are_independent(rate: float) -> None:
    mask = kept(7, rate)
    for lag in (1, 2, 3, 4, 8, 16, 64, 128):
        assert abs(correlation(mask[lag:], mask[:-lag])) < 4.5
        assert abs(correlation(mask[:, lag:], mask[:, :-lag])) < 4.5
        assert abs(correlation(mask[lag:, lag:], mask[:-lag, :-lag])) < 4.5
        assert abs(correlation(mask[lag:, :-lag], mask[:-lag, lag:])) < 4.5
    assert abs(correlation(mask, mask.t().contiguous())) < 4.5
    for seed in (8, 9, 15, 7 + 2**16, 7 + HEAD, 7 + 2 * HEAD, 7 - HEAD):
        assert abs(correlation(mask, kept(seed, rate))) < 4.5


@runs_here
def test_equal_seeds_give_equal_masks() -> None:
    assert kept(5, 0.5).equal(kept(5, 0.5))


def test_masks_of_heads_are_over_a_million_rows_apart() -> None:
    """Rows also add a constant each to the seed."""
    rows_per_head = [head * HEAD * pow(0x9E3779B9, -1, 2**32) % 2**32 for head in range(1, 65)]
    assert all(10**6 < rows < 2**32 - 10**6 for rows in rows_per_head)
