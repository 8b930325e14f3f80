"""The chunked operation against its oracle in plain torch, and the oracle against the formula."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surface_fusion.ops import linear_cross_entropy as module
from surface_fusion.ops.linear_cross_entropy import linear_cross_entropy, linear_cross_entropy_plain

MODES = ["single", "paired", "learned"]
EPS = 0.1
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def problem(
    mode: str = "single",
    tokens: int = 37,
    vocab: int = 101,
    dim: int = 12,
    dtype: torch.dtype = torch.float64,
    size: float = 1.0,
    seed: int = 0,
    device: str = "cpu",
) -> dict[str, Any]:
    """Arguments of the operation: every third row is padding, logits are about *size*."""
    generator = torch.Generator().manual_seed(seed)

    def randn(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator, dtype=torch.float64)

    features = randn(tokens, dim) if mode == "single" else randn(tokens, 2, dim)
    gate: Any = {"single": None, "paired": 0.8, "learned": torch.sigmoid(randn(tokens)).to(device, dtype)}[
        mode
    ]
    weights = torch.ones(tokens)
    weights[::3] = 0
    arguments = {
        "features": features.to(device, dtype).requires_grad_(),
        "weight": (size * dim**-0.5 * randn(vocab, dim)).to(device, dtype).requires_grad_(),
        "target": torch.randint(vocab, (tokens,), generator=generator).to(device),
        "row_weight": weights.to(device),
        "gate": gate.requires_grad_() if mode == "learned" else gate,
        "smoothing": EPS,
    }
    return arguments


def as_dtype(arguments: dict[str, Any], dtype: torch.dtype) -> dict[str, Any]:
    """The same numbers in another dtype."""
    return {
        name: value.detach().to(dtype).requires_grad_()
        if isinstance(value, Tensor) and value.requires_grad
        else value
        for name, value in arguments.items()
    }


@contextmanager
def chunks_of(rows: int) -> Iterator[None]:
    """Compute the logits of *rows* rows at a time."""
    with mock.patch.object(module, "_chunk_rows", lambda *_: rows):
        yield


def results(
    arguments: dict[str, Any], scale: float = 1.0, plain: bool = False
) -> tuple[list[Tensor], list[Tensor]]:
    """The three sums, and the gradients of *scale* times the loss; by the oracle if *plain*."""
    out = (linear_cross_entropy_plain if plain else linear_cross_entropy)(**arguments)
    inputs = [value for value in arguments.values() if isinstance(value, Tensor) and value.requires_grad]
    gradients = torch.autograd.grad(out.loss, inputs, grad_outputs=torch.full_like(out.loss, scale))
    return [x.detach() for x in out], list(gradients)


def assert_close(actual: list[Tensor], expected: list[Tensor], tolerance: float, least: float = 0) -> None:
    """Equal up to *tolerance* times the largest entry of each tensor, or times *least*."""
    for a, e in itertools.zip_longest(actual, expected):
        assert a.isfinite().all()
        atol = tolerance * max(e.abs().max().item() if e.numel() else 0, least)
        torch.testing.assert_close(a.to(e.dtype), e, rtol=0, atol=atol, check_device=False)


def assert_equals_oracle(arguments: dict[str, Any], tolerance: float, least: float = 0) -> None:
    for actual, expected in zip(results(arguments), results(arguments, plain=True), strict=True):
        assert_close(actual, expected, tolerance, least)


@pytest.mark.parametrize("mode", MODES)
def test_oracle_equals_the_formula(mode: str) -> None:
    a = problem(mode, tokens=5, vocab=7)
    z = a["features"].detach() @ a["weight"].detach().t()
    lsm = z - z.exp().sum(-1, keepdim=True).log()
    gate = a["gate"]
    if gate is not None:
        g = gate.detach()[:, None] if isinstance(gate, Tensor) else gate
        lsm = g * lsm[:, 0] + (1 - g) * lsm[:, 1]
    normalized = lsm - lsm.exp().sum(-1, keepdim=True).log()
    loss = nll = normalized_nll = 0.0
    for n in (1, 2, 4):  # rows 0 and 3 are padding
        y = a["target"][n]
        q = torch.full((7,), EPS / 6, dtype=torch.float64)
        q[y] = 1 - EPS
        loss -= (q * lsm[n]).sum()
        nll -= lsm[n, y]
        normalized_nll -= normalized[n, y]
    out = linear_cross_entropy_plain(**a)
    torch.testing.assert_close(
        torch.stack(out).detach(), torch.stack([loss, nll, normalized_nll]), rtol=1e-12, atol=0
    )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_gradcheck(mode: str, smoothing: float) -> None:
    a = problem(mode, tokens=5, vocab=7, dim=3) | {"smoothing": smoothing}
    names = [name for name in ("features", "weight", "gate") if isinstance(a[name], Tensor)]
    with chunks_of(4):
        assert torch.autograd.gradcheck(
            lambda *inputs: linear_cross_entropy(**(a | dict(zip(names, inputs, strict=True)))).loss,
            [a[name] for name in names],
        )


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"),
    [(torch.float64, 1e-14), (torch.float32, 1e-6), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)],
)
def test_equals_the_oracle(mode: str, dtype: torch.dtype, tolerance: float) -> None:
    """Half precision: against the oracle in float32, on the same numbers."""
    a = problem(mode, dtype=dtype)
    exact = torch.promote_types(dtype, torch.float32)
    with chunks_of(10):
        sums, gradients = results(a)
    assert all(x.dtype == exact and x.dim() == 0 for x in sums)
    assert all(g.dtype == dtype for g in gradients)
    expected_sums, expected_gradients = results(as_dtype(a, exact), plain=True)
    assert_close(sums, expected_sums, tolerance)
    assert_close(gradients, expected_gradients, tolerance)


@given(
    mode=st.sampled_from(MODES),
    tokens=st.integers(0, 9),
    vocab=st.integers(2, 140),
    dim=st.integers(1, 5),
    chunk_rows=st.integers(1, 20),
    smoothing=st.sampled_from([0.0, 0.1, 0.9]),
    size=st.sampled_from([1e-3, 1.0, 30.0, 1e4]),
    seed=st.integers(0, 999),
)
@settings(max_examples=80, deadline=None)
def test_equals_the_oracle_for_any_shape(chunk_rows: int, smoothing: float, **sizes: Any) -> None:
    with chunks_of(chunk_rows):  # a loss near 0 is a difference of large logits
        assert_equals_oracle(problem(**sizes) | {"smoothing": smoothing}, 1e-10, least=1)


@pytest.mark.parametrize("mode", MODES)
def test_chunk_size_does_not_change_the_result(mode: str) -> None:
    a = problem(mode)
    whole = results(a)
    for chunk_rows in (1, 2, 7, 64, 1000):
        with chunks_of(chunk_rows):
            chunked = results(a)
        for actual, expected in zip(chunked, whole, strict=True):
            assert_close(actual, expected, 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_row_weights_of_any_size_and_dtype(mode: str) -> None:
    for row_weight in (
        torch.rand(37) - 0.3,
        torch.full((37,), 1e5),
        torch.full((37,), 1e-6),
        torch.zeros(37),
    ):
        assert_equals_oracle(problem(mode) | {"row_weight": row_weight}, 1e-14)
        half = problem(mode, dtype=torch.float16) | {"row_weight": row_weight}
        single = as_dtype(half, torch.float32)
        scale = 1 / (row_weight.abs().max().item() or 1)
        assert_close(results(half, scale)[1], results(single, scale, plain=True)[1], 2e-2)
    arange = torch.arange(37)
    assert_equals_oracle(problem(mode) | {"row_weight": arange % 2 == 0}, 1e-14)
    assert_equals_oracle(problem(mode) | {"row_weight": arange}, 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_ignored_rows_do_not_count(mode: str) -> None:
    """For any finite features and any target."""
    a = problem(mode)
    sums, gradients = results(a)
    b = dict(a)
    b["features"] = a["features"].detach().clone()
    b["features"][::3] *= 1e3
    b["features"].requires_grad_()
    b["target"] = a["target"].clone()
    b["target"][::3] = -100
    for plain in (False, True):
        changed_sums, changed_gradients = results(b, plain=plain)
        assert_close(changed_sums, sums, 1e-14)
        assert_close(changed_gradients, gradients, 1e-14)
        assert not changed_gradients[0][::3].any()


@pytest.mark.parametrize("size", [1e-4, 1e4, 1e30])
@pytest.mark.parametrize("mode", MODES[:2])  # a gate's gradient, a difference of losses, vanishes with them
def test_tiny_and_huge_logits(mode: str, size: float) -> None:
    assert_equals_oracle(problem(mode, dtype=torch.float32, size=size), 1e-5)


def test_tied_weight_accumulates_both_gradients() -> None:
    a = problem()

    def gradient(plain: bool) -> Tensor:
        x = a["weight"][a["target"]] * a["features"].detach()
        loss = (linear_cross_entropy_plain if plain else linear_cross_entropy)(**(a | {"features": x})).loss
        return torch.autograd.grad(loss + a["weight"].square().sum(), a["weight"])[0]

    assert_close([gradient(False)], [gradient(True)], 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_only_the_required_gradients_are_computed(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    a = problem(mode)
    expected, (d_features, d_weight, *_) = results(a)
    frozen = {k: v.detach() if isinstance(v, Tensor) else v for k, v in a.items()}
    assert_close(results(frozen | {"features": a["features"]})[1], [d_features], 1e-14)
    assert_close(results(frozen | {"weight": a["weight"]})[1], [d_weight], 1e-14)

    monkeypatch.setattr(module, "_add_product", None)
    with torch.no_grad():
        out = linear_cross_entropy(**a)
    assert not out.loss.requires_grad
    assert_close(list(out), expected, 1e-14)
    assert_close(list(linear_cross_entropy(**frozen)), expected, 1e-14)
    if mode == "learned":
        assert_close(results(frozen | {"gate": a["gate"]})[1], [results(a, plain=True)[1][2]], 1e-14)


def test_only_the_loss_requires_grad() -> None:
    out = linear_cross_entropy(**problem("paired"))
    assert [x.requires_grad for x in out] == [True, False, False]


def test_loss_may_be_scaled_in_place_and_used_twice() -> None:
    """As fairseq's trainer does with a batch that it ignores."""
    a = problem()
    loss = linear_cross_entropy(**a).loss
    loss *= 3
    loss.backward(retain_graph=True)
    loss.backward()
    assert_close([a["weight"].grad], [6 * results(a)[1][1]], 1e-14)


@pytest.mark.parametrize("mode", MODES)
def test_empty_input_gives_zero(mode: str) -> None:
    sums, gradients = results(problem(mode, tokens=0))
    assert all(x == 0 for x in sums)
    assert all(not g.any() for g in gradients)


@pytest.mark.parametrize("mode", MODES)
def test_float16_under_a_loss_scale(mode: str) -> None:
    a = problem(mode, dtype=torch.float16)
    assert_close(results(a, 128)[1], results(as_dtype(a, torch.float32), 128, plain=True)[1], 2e-3)


@pytest.mark.parametrize("size", [1e-3, 1e3])
def test_float16_with_a_tiny_or_large_weight(size: float) -> None:
    """G E would leave the range of float16 in between, in units or not."""
    a = problem("paired", dtype=torch.float16, size=size)
    with torch.no_grad():
        a["features"].div_(size)
    scale = 1 / size
    assert_close(
        results(a, scale)[1][:1], results(as_dtype(a, torch.float32), scale, plain=True)[1][:1], 2e-3
    )


def test_float16_keeps_the_smoothing_term() -> None:
    """With certain predictions the gradient of a word that is no target is eps_i, 3e-6 a row."""
    vocab = 35_008
    a = problem(tokens=8, vocab=vocab, dim=4, dtype=torch.float16, size=0)
    with torch.no_grad():
        a["features"].uniform_(0.5, 1)
        a["target"].zero_()
        a["weight"][0] = 30
    _, (_, d_weight) = results(a, 128)
    _, (_, expected) = results(as_dtype(a, torch.float32), 128, plain=True)
    assert 0 < expected[1:].abs().max() < 128 * 8 * EPS / vocab
    torch.testing.assert_close(d_weight[1:].float(), expected[1:], rtol=1e-3, atol=0)


@pytest.mark.parametrize("scale", [1.0, 65536.0])
def test_float16_overflows_only_where_the_true_value_does(scale: float) -> None:
    """Thousands of rows with one target: G^T X, in units, exceeds 65504 in between."""
    a = problem(tokens=4096, vocab=8, dim=4, dtype=torch.float16)
    with torch.no_grad():
        a["features"].abs_().mul_(torch.tensor([1e-4, 1e-2, 1, 4]))
        a["target"].zero_()
    _, gradients = results(a, scale)
    _, expected = results(as_dtype(a, torch.float32), scale, plain=True)
    for actual, true in zip(gradients, expected, strict=True):
        distinct = (true.abs() < 65000) | (true.abs() > 66000)
        assert torch.equal(actual.isinf() & distinct, (true.abs() > 66000))
        finite = actual.isfinite()
        torch.testing.assert_close(actual[finite].float(), true[finite], rtol=1e-2, atol=1e-3 * scale)
    assert gradients[1].isinf().any() == (scale > 1)
    assert gradients[1].isfinite().any()


@pytest.mark.parametrize("mode", MODES)
def test_autocast(mode: str) -> None:
    a = problem(mode, dtype=torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        sums, gradients = results(a)
    assert all(g.dtype == torch.float32 for g in gradients)
    expected = results(a, plain=True)
    assert_close(sums, expected[0], 1e-2)
    assert_close(gradients, expected[1], 2e-2)


def test_mismatched_shapes_raise_a_value_error() -> None:
    for mode, gate in (("single", 0.5), ("paired", None)):
        with pytest.raises(ValueError, match=r"features \(37, .*N x 2 x C"):
            linear_cross_entropy(**(problem(mode) | {"gate": gate}))


def test_default_chunk_sizes() -> None:
    """8192 rows of the README model's logits in float16; on a CPU what fits into its caches."""
    assert module._chunk_rows(35_008 * 2, "cuda") == 8192
    assert module._chunk_rows(35_008 * 4, "cuda") == 4096
    assert module._chunk_rows(8_000 * 4, "cpu") == 512
    assert module._chunk_rows(10**6 * 4, "cpu") == 64


@cuda
@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(
    ("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 1e-2), (torch.float16, 2e-3)]
)
def test_cuda_equals_the_oracle(mode: str, dtype: torch.dtype, tolerance: float) -> None:
    for vocab in (1001, 31_672):
        a = problem(mode, tokens=300, vocab=vocab, dim=64, dtype=dtype, device="cuda")
        with chunks_of(128):
            sums, gradients = results(a, 128)
        expected = results(as_dtype(a, torch.float32), 128, plain=True)
        assert_close(sums, expected[0], tolerance)
        assert_close(gradients, expected[1], tolerance)


@cuda
@pytest.mark.parametrize("mode", MODES)
def test_cuda_memory(mode: str) -> None:
    a = problem(mode, tokens=16_384, vocab=35_008, dim=512, dtype=torch.float16, device="cuda")
    results(a)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    results(a, 128)
    assert torch.cuda.max_memory_allocated() - before <= 1.5 * 2**30


@cuda
@pytest.mark.parametrize("mode", MODES)
def test_cuda_graphs_of_forward_and_backward(mode: str) -> None:
    """Captured separately, replayed on new numbers with a different loss scale."""
    a = problem(mode, tokens=64, dtype=torch.float16, device="cuda")
    inputs = [a[name] for name in ("features", "weight", "gate") if isinstance(a[name], Tensor)]
    scale = torch.ones((), device="cuda")
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        for _ in range(3):
            torch.autograd.grad(linear_cross_entropy(**a).loss, inputs, scale)
    torch.cuda.current_stream().wait_stream(stream)
    forward, backward = torch.cuda.CUDAGraph(), torch.cuda.CUDAGraph()
    with torch.cuda.graph(forward):
        out = linear_cross_entropy(**a)
    with torch.cuda.graph(backward, pool=forward.pool()):
        gradients = torch.autograd.grad(out.loss, inputs, scale)

    new = problem(mode, tokens=64, dtype=torch.float16, device="cuda", seed=1)
    with torch.no_grad():
        for name, value in a.items():
            if isinstance(value, Tensor):
                value.copy_(new[name])
        scale.fill_(128)
    forward.replay()
    backward.replay()
    expected = results(new, 128)
    assert_close([x.detach() for x in out], expected[0], 1e-6)
    assert_close(list(gradients), expected[1], 1e-6)
