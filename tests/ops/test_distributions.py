"""The fusion functions against the published formulas, written out in float64."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surface_fusion.ops.distributions import MODES, exponentiated_log_probs, hard_log_probs, log_softmax

logits_pairs = st.builds(
    lambda seed, rows, vocab, scale: (
        scale
        * torch.randn(2, rows, vocab, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    ),
    st.integers(0, 10**6),
    st.integers(1, 4),
    st.integers(2, 40),
    st.sampled_from([0.01, 1.0, 5.0, 50.0]),
)
gates = st.floats(0, 1)
taus = st.floats(0, 2)
fast = settings(max_examples=60, deadline=None)


def hard(z: Tensor, s: Tensor, gate: Tensor | float) -> Tensor:
    return hard_log_probs(torch.stack([z, s], dim=-2), gate)


def lsm(x: Tensor) -> Tensor:
    return x - x.exp().sum(-1, keepdim=True).log() if x.abs().max() < 500 else torch.log_softmax(x, -1)


def published(mode: str, z: Tensor, s: Tensor, tau: float) -> Tensor:
    """Each ungated mode as the released code writes it."""
    return {
        "soft": lambda: lsm(z + lsm(tau * s)),
        "postnorm": lambda: lsm(lsm(tau * s) + lsm(z)),
        "soft_5": lambda: lsm(z + lsm(s / 5)),
        "postnorm_5": lambda: lsm(lsm(s / 5) + lsm(z)),
        "postnorm_v1": lambda: lsm((lsm(tau * s) + lsm(z)).exp()),
    }[mode]()


def ours(mode: str, z: Tensor, s: Tensor, tau: float) -> Tensor:
    """What the decoder computes for a mode, on logits."""
    scaled = s * MODES[mode].scale(tau)
    return exponentiated_log_probs(z, scaled) if MODES[mode].exponentiated else log_softmax(z + scaled)


def assert_close(a: Tensor, b: Tensor, atol: float = 1e-10) -> None:
    torch.testing.assert_close(a, b, atol=atol, rtol=1e-10)


def test_published_modes_and_their_scales() -> None:
    assert list(MODES) == ["hard", "soft", "postnorm", "soft_5", "postnorm_5", "postnorm_v1"]
    assert [name for name, mode in MODES.items() if mode.gated] == ["hard"]
    assert [name for name, mode in MODES.items() if mode.exponentiated] == ["postnorm_v1"]
    assert {name: mode.scale(0.7) for name, mode in MODES.items()} == {
        "hard": 0.7,
        "soft": 0.7,
        "postnorm": 0.7,
        "soft_5": 0.2,
        "postnorm_5": 0.2,
        "postnorm_v1": 0.7,
    }


@pytest.mark.parametrize("mode", [name for name, mode in MODES.items() if not mode.gated])
@fast
@given(logits_pairs, taus)
def test_ungated_modes_equal_the_published_formula_and_sum_to_one(
    mode: str, pair: Tensor, tau: float
) -> None:
    z, s = pair
    fused = ours(mode, z, s, tau)
    assert_close(fused, published(mode, z, s, tau))
    assert_close(fused.exp().sum(-1), torch.ones(len(z), dtype=torch.float64))


@fast
@given(logits_pairs, taus)
def test_soft_and_postnorm_are_one_projection(pair: Tensor, tau: float) -> None:
    z, s = pair
    assert_close(published("soft", z, s, tau), published("postnorm", z, s, tau))
    assert_close(published("soft_5", z, s, tau), published("postnorm_5", z, s, tau))
    assert_close(published("soft_5", z, s, tau), published("soft", z, s, 0.2))
    assert torch.equal(ours("soft_5", z, s, tau), ours("soft", z, s, 0.2))
    # E h + tau E r = E (h + tau r)
    matrix = torch.randn(z.shape[-1], 3, dtype=torch.float64)
    h, r = torch.randn(2, len(z), 3, dtype=torch.float64)
    assert_close(
        published("soft", h @ matrix.t(), r @ matrix.t(), tau), log_softmax((h + tau * r) @ matrix.t())
    )


@fast
@given(logits_pairs)
def test_tau_limits(pair: Tensor) -> None:
    z, s = pair
    for mode in ("soft", "postnorm"):
        assert_close(ours(mode, z, s, 0.0), lsm(z))
        assert_close(ours(mode, z, s, 1e-9), lsm(z), atol=1e-6)
        assert_close(ours(mode, z, s, 1.0), lsm(z + s))
        product = (lsm(z) + lsm(s)).exp()
        assert_close(ours(mode, z, s, 1.0).exp(), product / product.sum(-1, keepdim=True))
    uniform = torch.softmax(z, -1) / z.shape[-1]
    assert_close(ours("postnorm_v1", z, s, 0.0), lsm(uniform))


@fast
@given(logits_pairs, taus)
def test_postnorm_v1_is_nearly_uniform_and_ranks_like_soft(pair: Tensor, tau: float) -> None:
    z, s = pair
    v1, soft = ours("postnorm_v1", z, s, tau), ours("soft", z, s, tau)
    assert (v1.amax(-1) - v1.amin(-1)).max() <= 1 + 1e-12
    best = v1.gather(-1, soft.argmax(-1, keepdim=True)).squeeze(-1)
    assert_close(best, v1.amax(-1))


@fast
@given(logits_pairs, gates)
def test_hard_equals_the_published_formula_and_sums_to_at_most_one(pair: Tensor, gate: float) -> None:
    z, s = pair
    fused = hard(z, s, gate)
    assert_close(fused, gate * lsm(z) + (1 - gate) * lsm(s))
    assert fused.exp().sum(-1).max() <= 1 + 1e-12
    assert_close(hard(z, z, gate), lsm(z))
    assert_close(hard(z, s, gate), hard(s, z, 1 - gate))


@fast
@given(logits_pairs)
def test_hard_gate_limits(pair: Tensor) -> None:
    z, s = pair
    assert torch.equal(hard(z, s, 1.0), log_softmax(z))
    assert torch.equal(hard(z, s, 0.0), log_softmax(s))


@fast
@given(logits_pairs, gates)
def test_hard_gate_per_token_is_the_number_row_by_row(pair: Tensor, gate: float) -> None:
    z, s = pair
    gates_per_row = torch.rand(len(z), 1, dtype=torch.float64)
    gates_per_row[0] = gate
    fused = hard(z, s, gates_per_row)
    for row, g in enumerate(gates_per_row):
        assert_close(fused[row], hard(z[row], s[row], g.item()))


@fast
@given(logits_pairs, gates)
def test_renormalised_hard_ranks_like_hard(pair: Tensor, gate: float) -> None:
    z, s = pair
    published = hard(z, s, gate)
    renormalised = log_softmax(gate * z + (1 - gate) * s)
    assert_close(renormalised, lsm(published))
    # The two differ by one number a row, so no ranking changes.
    difference = renormalised - published
    assert_close(difference, difference[:, :1].expand_as(difference))
    assert difference.min() >= -1e-10


@fast
@given(logits_pairs, gates, taus, st.floats(-30, 30))
def test_a_constant_per_row_changes_nothing(pair: Tensor, gate: float, tau: float, constant: float) -> None:
    z, s = pair
    assert_close(hard(z + constant, s - constant, gate), hard(z, s, gate))
    for mode in ("soft", "postnorm_v1"):
        assert_close(ours(mode, z + constant, s - constant, tau), ours(mode, z, s, tau))


@fast
@given(logits_pairs, gates)
def test_vocabulary_order_does_not_matter(pair: Tensor, gate: float) -> None:
    z, s = pair
    order = torch.randperm(z.shape[-1])
    assert_close(hard(z, s, gate)[:, order], hard(z[:, order], s[:, order], gate))
    v1 = exponentiated_log_probs(z, s)
    assert_close(v1[:, order], exponentiated_log_probs(z[:, order], s[:, order]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_half_precision_logits_give_float32_results(dtype: torch.dtype) -> None:
    z, s = (4 * torch.randn(2, 3, 50)).to(dtype)
    exact_z, exact_s = z.double(), s.double()
    for fused, exact in (
        (log_softmax(z), lsm(exact_z)),
        (hard(z, s, 0.8), 0.8 * lsm(exact_z) + 0.2 * lsm(exact_s)),
        (exponentiated_log_probs(z, s), lsm((lsm(exact_z) + lsm(exact_s)).exp())),
    ):
        assert fused.dtype == torch.float32
        torch.testing.assert_close(fused.double(), exact, atol=2e-5, rtol=1e-6)


@pytest.mark.parametrize("size", [1e4, 3e38])
def test_huge_logits_stay_finite(size: float) -> None:
    z = torch.tensor([[size, 0.0, -size]]) / 2
    s = z.flip(-1)
    for fused in (hard(z, s, 0.5), exponentiated_log_probs(z, s), log_softmax(z)):
        assert not fused.isnan().any()
    assert exponentiated_log_probs(z, s).isfinite().all()


def test_gradients_equal_finite_differences() -> None:
    z, s = torch.randn(2, 2, 3, 5, dtype=torch.float64).requires_grad_().unbind(0)
    gate = torch.rand(2, 3, 1, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(log_softmax, (z,))
    assert torch.autograd.gradcheck(hard, (z, s, gate))
    assert torch.autograd.gradcheck(lambda a, b: hard(a, b, 0.8), (z, s))
    assert torch.autograd.gradcheck(exponentiated_log_probs, (z, s))


def test_gradient_of_a_learned_gate_is_the_difference_of_the_losses() -> None:
    z, s = torch.randn(2, 4, 7, dtype=torch.float64)
    gate = torch.rand(4, 1, dtype=torch.float64, requires_grad=True)
    (-hard(z, s, gate)[:, 3]).sum().backward()
    assert gate.grad is not None
    assert_close(gate.grad, (lsm(s) - lsm(z))[:, 3:4])


def test_rounding_may_exceed_the_spread_of_postnorm_v1() -> None:
    """One word has all the probability of both: the spread is 1 and an ulp more. Found by hypothesis."""
    generator = torch.Generator().manual_seed(69760)
    z, s = 50.0 * torch.randn(2, 3, 15, generator=generator, dtype=torch.float64)
    v1 = exponentiated_log_probs(z, s)
    assert (v1.amax(-1) - v1.amin(-1)).max().item() == pytest.approx(1, abs=1e-12)
