"""The kernels of packed attention against attention by padding: on a GPU, or in the interpreter."""

import math

import pytest
import torch
from torch import Tensor

from surface_fusion.ops.packed_attention import attend, attend_padded, attend_self
from surface_fusion.ops.packed_rows import PackedRows
from tests.helpers.interpreter import (
    DEVICE,
    assert_passes_in_the_interpreter,
    runs_here,
    starts_the_interpreter,
)
from tests.helpers.packed_sentences import rows_of

TOLERANCE = {torch.float32: 1e-5, torch.float16: 4e-3}
KINDS = pytest.mark.parametrize("kind", ["self", "causal", "cross"])
# Sentences of one token, more than a block of 64 of them, and one that is longer than two blocks.
LENGTHS = {"queries": (1, 3, 150, 7, 1, *(1,) * 70, 5), "keys": (2, 1, 90, 150, 3, *(1,) * 70, 1)}
FEW = {"queries": (1, 5, 2), "keys": (4, 1, 18)}


@starts_the_interpreter
def test_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    assert_passes_in_the_interpreter(pytestconfig, __file__)


def random(*shape: int, dtype: torch.dtype, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(DEVICE, dtype)


def sides(kind: str, lengths: dict[str, tuple[int, ...]]) -> tuple[PackedRows, PackedRows]:
    queries = rows_of(lengths["queries"], DEVICE)
    return queries, rows_of(lengths["keys"], DEVICE) if kind == "cross" else queries


def gradients(out: Tensor, weights: Tensor, leaves: list[Tensor]) -> list[Tensor]:
    return list(torch.autograd.grad((out.float() * weights).sum(), leaves))


def assert_near(got: Tensor, expected: Tensor, dtype: torch.dtype) -> None:
    tolerance = TOLERANCE[dtype] * max(expected.abs().max().item(), 1)
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=tolerance)


@runs_here
@KINDS
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("dim", [8, 20, 64, 512])
def test_values_and_gradients_equal_padded_attention(dim: int, dtype: torch.dtype, kind: str) -> None:
    queries, keys = sides(kind, LENGTHS if dim <= 20 else FEW)
    heads = 2 if dim <= 20 else 1
    leaves = [
        random(len(r.tokens), heads, dim, dtype=dtype, seed=i) for i, r in enumerate((queries, keys, keys))
    ]
    leaves = [x.requires_grad_() for x in leaves]
    exact = [x.detach().float().requires_grad_() for x in leaves]
    weights = random(*leaves[0].shape, dtype=torch.float32, seed=9)
    got = attend(*leaves, queries, keys, causal=kind == "causal")
    expected = attend_padded(*exact, queries, keys, causal=kind == "causal", rate=0.0)
    assert got.dtype == dtype
    assert_near(got, expected, dtype)
    for a, b in zip(gradients(got, weights, leaves), gradients(expected, weights, exact), strict=True):
        assert a.dtype == dtype
        assert_near(a, b, dtype)


@runs_here
@pytest.mark.parametrize("causal", [False, True])
def test_query_key_value_in_one_tensor(causal: bool) -> None:
    rows = rows_of(FEW["queries"], DEVICE)
    qkv = random(8, 3, 2, 20, dtype=torch.float32, seed=1).requires_grad_()
    weights = random(8, 2, 20, dtype=torch.float32, seed=2)
    got = attend_self(qkv, rows, causal=causal)
    expected = attend_padded(*qkv.unbind(1), rows, rows, causal=causal, rate=0.0)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    (a,), (b,) = gradients(got, weights, [qkv]), gradients(expected, weights, [qkv])
    torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@runs_here
def test_strided_inputs_and_expanded_gradient() -> None:
    """Keys and values of several attentions in one tensor; an expanded gradient."""
    queries, keys = sides("cross", FEW)
    q = random(8, 40, dtype=torch.float32, seed=1).requires_grad_()
    both = random(23, 4, 2, 10, dtype=torch.float32, seed=2).requires_grad_()

    def read(attend_by: str) -> Tensor:
        k, v = both[:, 2], both[:, 1]
        own = q.unflatten(1, (2, 20))[..., 5:15]
        if attend_by == "kernels":
            return attend(own, k, v, queries, keys)
        return attend_padded(own, k, v, queries, keys, causal=False, rate=0.0)

    got, expected = read("kernels"), read("padding")
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for loss in (Tensor.sum, lambda out: out.transpose(0, 2).square().sum()):
        a, b = (torch.autograd.grad(loss(out), [q, both], retain_graph=True) for out in (got, expected))
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


# Dropout

RATE = 0.3
SHORT = {"queries": (16, 1, 9, 16, 13, 5, 16, 2, 11), "keys": (3, 16, 1, 8, 15, 16, 4, 16, 16)}


def kept_weights(queries: PackedRows, keys: PackedRows, causal: bool, seed: Tensor, heads: int) -> Tensor:
    """Which weights are kept, N x H x 16: all scores are equal, and v makes the result the weights."""
    zeros = torch.zeros(len(queries.tokens), heads, 16, device=DEVICE)
    v = torch.eye(16, device=DEVICE)[keys.positions][:, None].expand(-1, heads, 16)
    k = torch.zeros(len(keys.tokens), heads, 16, device=DEVICE)
    return attend(zeros, k, v, queries, keys, causal=causal, rate=RATE, seed=seed) != 0


def visible(queries: PackedRows, keys: PackedRows, causal: bool) -> Tensor:
    positions = torch.arange(16, device=DEVICE)
    seen = positions < keys.starts.diff()[queries.sentence][:, None]
    return (seen & (positions <= queries.positions[:, None]) if causal else seen)[:, None]


def with_mask(
    q: Tensor, k: Tensor, v: Tensor, queries: PackedRows, keys: PackedRows, causal: bool, kept: Tensor
) -> Tensor:
    """Attention whose dropout mask is *kept*, in plain torch."""
    all_keys = (keys.starts[queries.sentence][:, None] + torch.arange(16, device=DEVICE)).clamp(
        max=len(k) - 1
    )
    scores = torch.einsum("nhd,nmhd->nhm", q, k[all_keys]) / math.sqrt(q.shape[-1])
    scores = scores.masked_fill(~visible(queries, keys, causal), -math.inf)
    return torch.einsum("nhm,nmhd->nhd", scores.softmax(-1) * kept / (1 - RATE), v[all_keys])


@runs_here
@KINDS
def test_forward_and_backward_kernels_use_one_dropout_mask(kind: str) -> None:
    queries, keys = sides(kind, SHORT)
    causal = kind == "causal"
    seed = torch.tensor(1234567, dtype=torch.int32, device=DEVICE)
    kept = kept_weights(queries, keys, causal, seed, heads=2)
    q, k, v = (
        random(len(r.tokens), 2, 24, dtype=torch.float32, seed=i) for i, r in enumerate((queries, keys, keys))
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    weights = random(*q.shape, dtype=torch.float32, seed=9)
    got = attend(*leaves, queries, keys, causal=causal, rate=RATE, seed=seed)
    expected = with_mask(*leaves, queries, keys, causal, kept)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)
    for a, b in zip(gradients(got, weights, leaves), gradients(expected, weights, leaves), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-5)


@runs_here
def test_dropout_masks_of_seeds_and_heads_are_independent() -> None:
    rows = rows_of((16,) * 20, DEVICE)
    seeds = torch.tensor([1, 1, 2], dtype=torch.int32, device=DEVICE)
    first, same, different = (kept_weights(rows, rows, False, seed, heads=2) for seed in seeds)
    assert first.equal(same)
    masks = [first[:, 0], first[:, 1], different[:, 0], different[:, 1]]
    for i, mask in enumerate(masks):
        assert mask.float().mean().item() == pytest.approx(1 - RATE, abs=0.03)
        for earlier in masks[:i]:  # independent: both kept with the product of the probabilities
            assert (mask & earlier).float().mean().item() == pytest.approx((1 - RATE) ** 2, abs=0.03)


@runs_here
def test_without_dropout_the_seed_is_not_read() -> None:
    rows = rows_of((3,), DEVICE)
    x = torch.ones(3, 1, 8, device=DEVICE)
    assert attend(x, x, x, rows, rows, rate=0.0, seed=None).equal(attend(x, x, x, rows, rows))
