"""Pooled source embeddings against loops over tokens."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from surface_fusion.modules.pooling import PUBLISHED_FIRST_ID, max_pool, mean_pool, pooled_tokens

PAD = 1
token_rows = st.lists(
    st.lists(st.sampled_from([0, 2, 3, 4, 49, 50, 51, 60]), max_size=6), min_size=1, max_size=4
)


def padded(rows: list[list[int]], width: int, left: bool) -> torch.Tensor:
    return torch.tensor(
        [[PAD] * (width - len(r)) + r if left else r + [PAD] * (width - len(r)) for r in rows]
    )


def embedded(tokens: torch.Tensor) -> torch.Tensor:
    """A fixed vector for each id, B x S x 3."""
    table = torch.randn(64, 3, generator=torch.Generator().manual_seed(3), dtype=torch.float64)
    return table[tokens]


@settings(deadline=None)
@given(token_rows, st.booleans(), st.booleans(), st.integers(0, 3))
def test_pools_equal_loops_whatever_the_padding(
    rows: list[list[int]], published: bool, left: bool, extra: int
) -> None:
    tokens = padded(rows, max(1, max(map(len, rows))) + extra, left)
    embed = embedded(tokens)
    keep = pooled_tokens(tokens, PAD, published)
    mean, largest = mean_pool(embed, keep), max_pool(embed, keep, published)
    assert mean.shape == largest.shape == (len(rows), 1, 3)
    for i, row in enumerate(rows):
        kept = [embedded(torch.tensor(t)) for t in row if t >= PUBLISHED_FIRST_ID or not published]
        zero = torch.zeros(3, dtype=torch.float64)
        expected_mean = sum(kept, zero) / max(1, len(kept))
        torch.testing.assert_close(mean[i, 0], expected_mean)
        if published and len(kept) < tokens.shape[1]:
            kept.append(zero)
        expected_max = torch.stack(kept).amax(0) if kept else zero
        torch.testing.assert_close(largest[i, 0], expected_max)


def test_published_rule_keeps_ids_from_50() -> None:
    tokens = torch.tensor([[PAD, 0, 2, 3, 49, 50, 51]])
    assert pooled_tokens(tokens, PAD, published=True).tolist() == [[False] * 5 + [True] * 2]
    assert pooled_tokens(tokens, PAD, published=False).tolist() == [[False] + [True] * 6]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_dtype_is_kept_and_nothing_overflows(dtype: torch.dtype) -> None:
    embed = torch.full((2, 900, 4), 100.0, dtype=dtype)
    keep = torch.ones(2, 900, dtype=torch.bool)
    keep[1] = False
    for pooled in (mean_pool(embed, keep), max_pool(embed, keep, False), max_pool(embed, keep, True)):
        assert pooled.dtype == dtype
        torch.testing.assert_close(pooled[0], torch.full((1, 4), 100.0, dtype=dtype))
        assert (pooled[1] == 0).all()


def test_negative_maximum_stays_negative_unless_published() -> None:
    embed = -torch.ones(1, 2, 3)
    keep = torch.tensor([[True, False]])
    assert (max_pool(embed, keep, published=False) == -1).all()
    assert (max_pool(embed, keep, published=True) == 0).all()


def test_gradients() -> None:
    embed = torch.randn(2, 4, 3, dtype=torch.float64, requires_grad=True)
    keep = torch.tensor([[True, True, False, True], [False, True, False, False]])
    assert torch.autograd.gradcheck(lambda e: mean_pool(e, keep), embed)
    assert torch.autograd.gradcheck(lambda e: max_pool(e, keep, False), embed)
    assert torch.autograd.gradcheck(lambda e: max_pool(e, keep, True), embed)
    mean_pool(embed, keep).sum().backward()
    assert embed.grad is not None
    assert (embed.grad[~keep] == 0).all()
