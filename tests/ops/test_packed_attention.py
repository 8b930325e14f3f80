"""Attention by padding equals the formula in a loop over sentences.

Also tests ``ops/packed_rows.py``.
"""

import math

import pytest
import torch
from torch import Tensor

from surface_fusion.ops.packed_attention import attend_padded
from surface_fusion.ops.packed_rows import PackedRows
from tests.helpers.packed_sentences import rows_of

QUERIES, KEYS = (3, 1, 5, 2), (4, 6, 1, 2)


def inputs(n: int, m: int, heads: int = 2, dim: int = 3) -> list[Tensor]:
    generator = torch.Generator().manual_seed(n)
    shapes = ((n, heads, dim), (m, heads, dim), (m, heads, dim))
    return [torch.randn(s, generator=generator, dtype=torch.float64).requires_grad_() for s in shapes]


def one_by_one(
    q: Tensor, k: Tensor, v: Tensor, queries: PackedRows, keys: PackedRows, causal: bool
) -> Tensor:
    """The formula, in a loop over sentences."""
    out = []
    for i in range(len(queries.starts) - 1):
        own, others = (slice(rows.starts[i], rows.starts[i + 1]) for rows in (queries, keys))
        scores = torch.einsum("nhd,mhd->hnm", q[own], k[others]) / math.sqrt(q.shape[-1])
        if causal:
            scores = scores.masked_fill(torch.ones_like(scores[0], dtype=torch.bool).triu(1), -math.inf)
        out.append(torch.einsum("hnm,mhd->nhd", scores.softmax(-1), v[others]))
    return torch.cat(out)


@pytest.mark.parametrize("kind", ["self", "causal", "cross"])
def test_equals_a_loop_over_sentences(kind: str) -> None:
    queries = rows_of(QUERIES)
    keys = rows_of(KEYS) if kind == "cross" else queries
    x = inputs(sum(QUERIES), len(keys.tokens))
    causal = kind == "causal"
    got = attend_padded(*x, queries, keys, causal=causal, rate=0.0)
    torch.testing.assert_close(got, one_by_one(*x, queries, keys, causal))
    assert torch.autograd.gradcheck(
        lambda q, k, v: attend_padded(q, k, v, queries, keys, causal=causal, rate=0.0), x
    )


def test_dropout_drops_weights_at_its_rate() -> None:
    rows = rows_of((20,) * 30)
    zeros = torch.zeros(600, 2, 20)
    v = torch.eye(20).repeat(30, 1)[:, None].expand(600, 2, 20)  # so the result is the weights
    torch.manual_seed(1)
    weights = attend_padded(zeros, zeros, v, rows, rows, causal=False, rate=0.3)
    kept = weights != 0
    torch.testing.assert_close(weights[kept], torch.full((int(kept.sum()),), 1 / 20 / 0.7))
    assert kept.float().mean().item() == pytest.approx(0.7, abs=0.02)
    torch.manual_seed(1)
    assert weights.equal(attend_padded(zeros, zeros, v, rows, rows, causal=False, rate=0.3))
