"""The surface attention against an explicit softmax in float64."""

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surface_fusion.modules.surface_attention import SurfaceAttention

SIZES = [(8, 8, 1), (8, 8, 4), (8, 6, 1), (8, 12, 4)]  # embed_dim, source_dim, heads


def attention(embed_dim: int, source_dim: int, heads: int, dropout: float = 0.0) -> SurfaceAttention:
    torch.manual_seed(0)
    module = SurfaceAttention(embed_dim, source_dim, heads, dropout).double().eval()
    torch.nn.init.normal_(module.out_proj.bias)
    return module


def inputs(embed_dim: int, source_dim: int, tgt_len: int = 5, seed: int = 0) -> tuple[Tensor, ...]:
    """query T x B x C, key S x B x C', value B x S x C', padding mask B x S of three sentences of 6, 2, 4."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    mask = torch.zeros(3, 6, dtype=torch.bool)
    mask[1, :4] = True  # left padding
    mask[2, 4:] = True  # right padding
    return randn(tgt_len, 3, embed_dim), randn(6, 3, source_dim), randn(3, 6, source_dim), mask


def oracle(module: SurfaceAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor) -> Tensor:
    """The equation, sentence by sentence, head by head, over the tokens without padding."""
    heads, rows = module.num_heads, []
    for b in range(value.shape[0]):
        real = ~mask[b]
        q = query[:, b] @ module.q_proj.weight.t() + module.q_proj.bias
        k = key[real, b] @ module.k_proj.weight.t() + module.k_proj.bias
        v = value[b, real] @ module.v_proj.weight.t() + module.v_proj.bias
        width = q.shape[-1] // heads
        read = []
        for h in range(heads):
            part = slice(h * width, (h + 1) * width)
            scores = q[:, part] @ k[:, part].t() / math.sqrt(width)
            weights = scores.exp() / scores.exp().sum(-1, keepdim=True)
            read.append(weights @ v[:, part])
        rows.append(torch.cat(read, -1) @ module.out_proj.weight.t() + module.out_proj.bias)
    return torch.stack(rows)


@pytest.mark.parametrize("sizes", SIZES)
@settings(max_examples=20, deadline=None)
@given(st.integers(0, 10**6), st.integers(1, 6))
def test_equals_the_explicit_softmax(sizes: tuple[int, int, int], seed: int, tgt_len: int) -> None:
    module = attention(*sizes)
    args = inputs(*sizes[:2], tgt_len=tgt_len, seed=seed)
    torch.testing.assert_close(module(*args), oracle(module, *args), atol=1e-12, rtol=1e-10)


@pytest.mark.parametrize("sizes", SIZES)
def test_gradients_equal_the_explicit_softmax(sizes: tuple[int, int, int]) -> None:
    module = attention(*sizes)
    *tensors, mask = inputs(*sizes[:2])
    weight = torch.randn(3, 5, sizes[0], dtype=torch.float64)
    grads = []
    for function in (module, lambda *args: oracle(module, *args)):
        leaves = [t.clone().requires_grad_() for t in tensors]
        module.zero_grad()
        (function(*leaves, mask) * weight).sum().backward()
        grads.append([t.grad for t in leaves] + [p.grad.clone() for p in module.parameters()])
    for mine, explicit in zip(*grads, strict=True):
        torch.testing.assert_close(mine, explicit, atol=1e-12, rtol=1e-9)


def test_gradcheck() -> None:
    module = attention(4, 2, 2)
    *tensors, mask = inputs(4, 2, tgt_len=2)
    leaves = [t.requires_grad_() for t in tensors]
    assert torch.autograd.gradcheck(lambda q, k, v: module(q, k, v, mask), leaves)


@pytest.mark.parametrize("heads", [1, 4])
def test_padding_has_exactly_no_weight(heads: int) -> None:
    module = attention(8, 8, heads)
    query, key, value, mask = inputs(8, 8)
    before = module(query, key, value, mask)
    value.requires_grad_()
    module(query, key, value, mask).sum().backward()
    assert value.grad is not None
    assert (value.grad[mask] == 0).all()
    assert (value.grad[~mask] != 0).any(-1).all()
    with torch.no_grad():
        value[mask] = 1e6
        key[mask.t()] = 1e6
    assert torch.equal(module(query, key, value, mask), before)


@pytest.mark.parametrize("left", [True, False])
def test_more_padding_changes_nothing(left: bool) -> None:
    module = attention(8, 8, 4)
    query, key, value, mask = inputs(8, 8)
    before = module(query, key, value, mask)
    extra = 3

    def widen(x: Tensor, dim: int, fill: float) -> Tensor:
        shape = list(x.shape)
        shape[dim] = extra
        blank = x.new_full(shape, fill)
        return torch.cat([blank, x] if left else [x, blank], dim=dim)

    after = module(query, widen(key, 0, 7.0), widen(value, 1, -9.0), widen(mask, 1, True))
    torch.testing.assert_close(after, before, atol=1e-12, rtol=0)


def test_a_source_of_padding_alone_is_finite() -> None:
    module = attention(8, 8, 2)
    query, key, value, mask = inputs(8, 8)
    mask[1] = True
    out = module(query, key, value.requires_grad_(), mask)
    assert out.isfinite().all()
    out.sum().backward()
    assert value.grad is not None and value.grad.isfinite().all()


@pytest.mark.parametrize("order", [[1, 2, 0], [2, 2, 1]])
def test_batch_order_follows(order: list[int]) -> None:
    module = attention(8, 6, 4)
    query, key, value, mask = inputs(8, 6)
    reordered = module(query[:, order], key[:, order], value[order], mask[order])
    torch.testing.assert_close(reordered, module(query, key, value, mask)[order], atol=1e-12, rtol=0)


@pytest.mark.parametrize("sizes", SIZES)
def test_cached_steps_equal_one_pass(sizes: tuple[int, int, int]) -> None:
    module = attention(*sizes)
    query, key, value, mask = inputs(*sizes[:2])
    full = module(query, key, value, mask)
    state: dict[str, Any] = {}
    for step in range(len(query)):
        out = module(query[step : step + 1], key, value, mask, state)
        torch.testing.assert_close(out[:, 0], full[:, step], atol=1e-12, rtol=0)
        key, value = key + 1, value - 1  # not read from the second step on


def test_the_cache_is_reordered_with_the_beams_and_shrinks_with_the_batch() -> None:
    module = attention(8, 6, 4)
    query, key, value, mask = inputs(8, 6)
    full = module(query, key, value, mask)
    state: dict[str, Any] = {}
    module(query[:1], key, value, mask, state)
    rows = torch.arange(3)
    for step, order in enumerate([[2, 0, 1], [1, 1], [0, 1, 0, 0]], start=1):
        rows = rows[order]
        module.reorder_incremental_state(state, torch.tensor(order))
        out = module(query[step : step + 1, rows], key[:, :1], value[:1], mask[:1], state)
        torch.testing.assert_close(out[:, 0], full[rows, step], atol=1e-12, rtol=0)


def test_reordering_an_empty_state_is_harmless() -> None:
    state: dict[str, Any] = {}
    attention(8, 8, 1).reorder_incremental_state(state, torch.tensor([1, 0]))
    assert state == {}


def test_two_modules_have_separate_caches() -> None:
    first, second = attention(8, 8, 1), attention(8, 8, 1)
    args = inputs(8, 8)
    state: dict[str, Any] = {}
    first(*args, state)
    torch.nn.init.normal_(second.v_proj.weight)
    expected = second(*args)
    assert torch.equal(second(*args, state), expected)
    assert len(state) == 2


def test_without_a_state_nothing_is_cached() -> None:
    module = attention(8, 8, 1)
    query, key, value, mask = inputs(8, 8)
    module(query, key, value, mask)
    assert not torch.equal(module(query, key, value + 1, mask), module(query, key, value, mask))


def test_dropout_acts_on_the_weights_in_training_only() -> None:
    """With values that are one-hot and linear maps that are the identity, the output is the weights."""
    module = attention(6, 6, 1, dropout=0.25)
    with torch.no_grad():
        for proj in (module.v_proj, module.out_proj):
            proj.weight.copy_(torch.eye(6))
            proj.bias.zero_()
    query, key, _, _ = inputs(6, 6, tgt_len=400)
    mask = torch.zeros(3, 6, dtype=torch.bool)
    value = torch.eye(6, dtype=torch.float64).expand(3, 6, 6)
    weights = module(query, key, value, mask)
    torch.testing.assert_close(weights.sum(-1), torch.ones(3, 400, dtype=torch.float64))
    assert torch.equal(module(query, key, value, mask), weights)
    dropped = module.train()(query, key, value, mask)
    kept = dropped != 0
    torch.testing.assert_close(dropped[kept], weights[kept] / 0.75)
    assert abs(kept.double().mean().item() - 0.75) < 0.03
    module.dropout_module.p = 1.0
    assert (module(query, key, value, mask) == 0).all()


def test_dropout_can_be_retained_after_training() -> None:
    """As ``fairseq-generate --retain-dropout`` does."""
    module = attention(8, 8, 1, dropout=0.5)
    args = inputs(8, 8)
    assert torch.equal(module(*args), module(*args))
    module.dropout_module.make_generation_fast_("sf_attn", retain_dropout=True)
    assert not torch.equal(module(*args), module(*args))


def test_initial_values_are_those_of_the_published_attention() -> None:
    """Xavier-uniform with gain 1/sqrt(2) for query, key, value, gain 1 for the output, output bias 0."""
    torch.manual_seed(0)
    module = SurfaceAttention(64, 64, 1, 0.0)
    for name, gain in (("q_proj", 2**-0.5), ("k_proj", 2**-0.5), ("v_proj", 2**-0.5), ("out_proj", 1.0)):
        weight = getattr(module, name).weight
        bound = gain * math.sqrt(6 / (64 + 64))
        assert 0.99 * bound < weight.abs().max() <= bound
        assert abs(weight.std().item() * math.sqrt(3) / bound - 1) < 0.03
    assert (module.out_proj.bias == 0).all()
    assert (module.q_proj.bias != 0).any()


def test_parameter_count() -> None:
    """Four maps of 512 x 512 with biases: what the paper's attention costs."""
    assert sum(p.numel() for p in SurfaceAttention(512, 512, 1, 0.1).parameters()) == 1_050_624


@pytest.mark.parametrize(("embed_dim", "source_dim", "heads"), SIZES)
def test_weights_times_values_are_the_output(embed_dim: int, source_dim: int, heads: int) -> None:
    module = attention(embed_dim, source_dim, heads)
    query, key, value, mask = inputs(embed_dim, source_dim)
    weights = module.weights(query, key, mask).double()
    assert weights.masked_select(mask[:, None, None, :]).eq(0).all()
    read = weights @ module.split_heads(module.v_proj(value))
    expected = module.out_proj(read.transpose(1, 2).flatten(2))
    torch.testing.assert_close(module(query, key, value, mask), expected, rtol=1e-5, atol=1e-6)
