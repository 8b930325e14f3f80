"""The fused decoder against the published equations, written out in float64."""

import itertools
import math
from typing import Any

import pytest
import torch
from fairseq.models.transformer import TransformerDecoderBase
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surface_fusion.modules.layerdrop import skip_decoder_layer
from tests.helpers.tiny import (
    PAD,
    SHARED,
    VOCAB,
    assert_incremental_equals_full,
    batch,
    build,
    gradients,
    log_probs,
    loss,
    shaken,
)

ATT = ("--surfacefusion", "att")
MEAN, MAX = ("--surfacefusion", "mean"), ("--surfacefusion", "max")
SOURCES = [ATT, MEAN, MAX]
HARD = ("--sf-mode", "hard", "--sf-gate", "0.8")
LEARNED = ("--sf-mode", "hard", "--sf-gate", "0")
SOFT = ("--sf-mode", "soft", "--sf-softmax-tau", "0.7")
FUSIONS = [
    HARD,
    LEARNED,
    (*HARD, "--sf-renormalize"),
    (*LEARNED, "--sf-renormalize"),
    SOFT,
    ("--sf-mode", "postnorm", "--sf-softmax-tau", "0.7"),
    ("--sf-mode", "soft_5"),
    ("--sf-mode", "postnorm_5", "--sf-softmax-tau", "0.7"),
    ("--sf-mode", "postnorm_v1", "--sf-softmax-tau", "0.7"),
]
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
OPTIONS = [
    (),
    ("--no-sf-ffn",),
    ("--sf-linear",),
    ("--no-sf-ffn", "--sf-linear", SHARED),
    ("--sf-posedemb", SHARED),
    (*PRE_NORM, "--sf-linear", "--activation-fn", "tanh"),
    ("--layer-wise-attention", "--share-decoder-input-output-embed"),
    ("--layernorm-embedding", "--encoder-learned-pos", "--decoder-learned-pos"),
]
ATT_OPTIONS = [
    ("--sf-attention-heads", "4"),
    ("--sf-no-detach", *PRE_NORM),
    ("--encoder-embed-dim", "24", "--decoder-embed-dim", "16"),
    ("--encoder-embed-dim", "24", "--decoder-embed-dim", "16", "--layer-wise-attention", "--sf-posedemb"),
    ("--decoder-output-dim", "12"),
    ("--no-cross-attention",),
    ("--cross-self-attention",),
    ("--decoder-layers", "3", "--sf-idx", "0"),
    ("--decoder-layers", "3", "--sf-idx", "-2"),
]


def value(flags: tuple[str, ...], name: str, default: float) -> float:
    return float(flags[flags.index(name) + 1]) if name in flags else default


def lsm(x: Tensor) -> Tensor:
    return x - x.exp().sum(-1, keepdim=True).log()


def explicit_attention(sf: Any, query: Tensor, key: Tensor, surface: Tensor, padding: Tensor) -> Tensor:
    """query T x B x C, key S x B x C', surface B x S x C' -> B x T x C."""
    q, k, v = sf.q_proj(query.transpose(0, 1)), sf.k_proj(key.transpose(0, 1)), sf.v_proj(surface)
    width = q.shape[-1] // sf.num_heads
    read = []
    for part in torch.arange(q.shape[-1]).split(width):
        scores = q[..., part] @ k[..., part].transpose(1, 2) / math.sqrt(width)
        weights = scores.masked_fill(padding[:, None, :], -torch.inf).softmax(-1)
        read.append(weights @ v[..., part])
    return sf.out_proj(torch.cat(read, -1))


def oracle(model: Any, sample: dict[str, Any], flags: tuple[str, ...], query_layer: int = -1) -> Tensor:
    """Log-probabilities by the published equations from fairseq's own encoder and decoder outputs."""
    net, decoder = sample["net_input"], model.decoder
    out = model.encoder(net["src_tokens"])
    h, extra = TransformerDecoderBase.extract_features(decoder, net["prev_output_tokens"], out)
    surface = out["encoder_embedding"][0]
    if "att" in flags:
        query = extra["inner_states"][1:][query_layer]
        key = out["encoder_out"][0][..., -surface.shape[-1] :]
        if "--sf-no-detach" not in flags:
            query, key = query.detach(), key.detach()
        r = explicit_attention(decoder.sf_attn, query, key, surface, net["src_tokens"].eq(PAD))
        if "--decoder-output-dim" in flags:
            r = r @ decoder.project_out_dim.weight.t()
    else:
        r = surface.repeat(1, h.shape[1], 1)
    if "--no-sf-ffn" not in flags:
        act = torch.tanh if "tanh" in flags else torch.relu
        h = h + decoder.fc2(act(decoder.fc1(h)))
        r = r + decoder.fc2(act(decoder.fc1(r)))
    if "--sf-linear" in flags:
        h, r = h @ decoder.tgt_out_dim.weight.t(), r @ decoder.src_out_dim.weight.t()
    matrix = decoder.output_projection.weight
    z, s = h @ matrix.t(), r @ matrix.t()
    gate: Any = value(flags, "--sf-gate", 0.0)
    if gate == 0 and "hard" in flags:
        gate = torch.sigmoid(torch.cat([h, r], -1) @ decoder.meanmaxweight[0]).unsqueeze(-1)
    tau = value(flags, "--sf-softmax-tau", 1.0)
    mode = flags[flags.index("--sf-mode") + 1]
    hard = gate * lsm(z) + (1 - gate) * lsm(s)
    return {
        "hard": lsm(hard) if "--sf-renormalize" in flags else hard,
        "soft": lsm(z + lsm(tau * s)),
        "postnorm": lsm(lsm(tau * s) + lsm(z)),
        "soft_5": lsm(z + lsm(s / 5)),
        "postnorm_5": lsm(lsm(s / 5) + lsm(z)),
        "postnorm_v1": lsm((lsm(tau * s) + lsm(z)).exp()),
    }[mode]


def assert_equals_oracle(flags: tuple[str, ...], query_layer: int = -1) -> None:
    """Log-probabilities, probabilities and every parameter's gradient."""
    model, sample = shaken(*flags).double(), batch()
    mine, theirs = log_probs(model, sample), oracle(model, sample, flags, query_layer)
    torch.testing.assert_close(mine, theirs, atol=1e-10, rtol=1e-9)
    probs = model.get_normalized_probs(model(**sample["net_input"]), log_probs=False)
    torch.testing.assert_close(probs, theirs.exp(), atol=1e-10, rtol=1e-9)
    weight = torch.randn(mine.shape, dtype=mine.dtype, generator=torch.Generator().manual_seed(0))
    parameters = dict(model.named_parameters())
    for name, a, b in zip(
        parameters,
        torch.autograd.grad((mine * weight).sum(), list(parameters.values()), allow_unused=True),
        torch.autograd.grad((theirs * weight).sum(), list(parameters.values()), allow_unused=True),
        strict=True,
    ):
        # No gradient at all only where the explicit formula has none either.
        assert (a is None) == (b is None), name
        if a is not None:
            torch.testing.assert_close(a, b, atol=1e-8, rtol=1e-7, msg=lambda text, n=name: f"{n}: {text}")


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
def test_every_mode_and_source_equals_the_published_equations(
    fusion: tuple[str, ...], source: tuple[str, ...]
) -> None:
    assert_equals_oracle((*source, *fusion))


@pytest.mark.parametrize("fusion", [HARD, LEARNED, SOFT], ids=" ".join)
@pytest.mark.parametrize("option", OPTIONS[1:], ids=" ".join)
def test_every_option_equals_the_published_equations(
    option: tuple[str, ...], fusion: tuple[str, ...]
) -> None:
    for source in SOURCES:
        assert_equals_oracle((*source, *fusion, *option))


@pytest.mark.parametrize("fusion", [HARD, SOFT, (*LEARNED, "--sf-linear")], ids=" ".join)
@pytest.mark.parametrize("option", ATT_OPTIONS, ids=" ".join)
def test_options_of_the_attention_equal_the_published_equations(
    option: tuple[str, ...], fusion: tuple[str, ...]
) -> None:
    assert_equals_oracle((*ATT, *fusion, *option), int(value(option, "--sf-idx", -1)))


@pytest.mark.parametrize("source", [MEAN, MAX], ids=" ".join)
def test_pooled_sources_with_an_output_width_of_their_own(source: tuple[str, ...]) -> None:
    sizes = ("--encoder-embed-dim", "12", "--decoder-embed-dim", "16", "--decoder-output-dim", "12")
    assert_equals_oracle((*source, *HARD, *sizes))


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", [HARD, LEARNED, SOFT], ids=" ".join)
def test_separate_vocabularies_equal_the_published_equations(
    fusion: tuple[str, ...], source: tuple[str, ...]
) -> None:
    model = shaken(*source, *fusion, vocab=(70, 55)).double()
    sample = batch(vocab=(70, 55))
    mine = log_probs(model, sample)
    assert mine.shape[-1] == 55
    torch.testing.assert_close(mine, oracle(model, sample, (*source, *fusion)), atol=1e-10, rtol=1e-9)


# Identities


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
def test_modes_that_are_one_function_give_one_output(source: tuple[str, ...]) -> None:
    outs = {
        name: log_probs(shaken(*source, "--sf-mode", mode, "--sf-softmax-tau", tau), batch())
        for name, (mode, tau) in {
            "soft": ("soft", "0.2"),
            "postnorm": ("postnorm", "0.2"),
            "soft_5": ("soft_5", "1"),
            "postnorm_5": ("postnorm_5", "0.9"),
        }.items()
    }
    for out in outs.values():
        assert torch.equal(out, outs["soft"])


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("gate", [HARD, LEARNED], ids=" ".join)
def test_renormalised_hard_equals_hard_divided_by_its_sum(
    gate: tuple[str, ...], source: tuple[str, ...]
) -> None:
    hard = log_probs(shaken(*source, *gate).double(), batch())
    renormalised = log_probs(shaken(*source, *gate, "--sf-renormalize").double(), batch())
    torch.testing.assert_close(renormalised, lsm(hard), atol=1e-10, rtol=0)
    assert torch.equal(renormalised.argmax(-1), hard.argmax(-1))
    assert (hard.exp().sum(-1) < 1).all()


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
def test_gate_one_and_tau_zero_leave_the_target_branch_alone(source: tuple[str, ...]) -> None:
    flags = (*source, "--no-sf-ffn")
    fused = [
        log_probs(shaken(*flags, *fusion), batch())
        for fusion in (
            ("--sf-gate", "1.0"),
            ("--sf-gate", "1.0", "--sf-renormalize"),
            ("--sf-mode", "soft", "--sf-softmax-tau", "0"),
        )
    ]
    model = shaken(*flags, "--sf-gate", "1.0")
    plain = build()[0].eval()
    plain.load_state_dict({k: v for k, v in model.state_dict().items() if k in plain.state_dict()})
    for out in fused:
        torch.testing.assert_close(out, log_probs(plain, batch()), atol=2e-6, rtol=0)


@settings(max_examples=25, deadline=None)
@given(st.floats(1e-6, 1.0))
def test_probabilities_of_hard_fusion_sum_to_at_most_one(gate: float) -> None:
    model, sample = shaken(*ATT, "--sf-gate", repr(gate)), batch()
    sums = log_probs(model, sample).exp().sum(-1)
    assert (sums <= 1 + 1e-5).all() and (sums > 0).all()


# Padding and batch order

CASES = [
    (*source, *fusion, *option)
    for source, (fusion, option) in itertools.product(
        SOURCES,
        [(HARD, ()), (LEARNED, ("--sf-linear",)), (SOFT, PRE_NORM), (HARD, ("--layer-wise-attention",))],
    )
]


@pytest.mark.parametrize("flags", CASES, ids=" ".join)
@settings(max_examples=6, deadline=None)
@given(st.integers(0, 4), st.integers(0, 3), st.booleans())
def test_more_padding_changes_nothing_at_real_positions(
    flags: tuple[str, ...], extra_src: int, extra_tgt: int, left: bool
) -> None:
    model, sample = shaken(*flags), batch()
    padded = batch(left_pad_source=left, extra_src=extra_src, extra_tgt=extra_tgt)
    real, padded_real = sample["target"].ne(PAD), padded["target"].ne(PAD)
    torch.testing.assert_close(
        log_probs(model, padded)[padded_real], log_probs(model, sample)[real], atol=3e-5, rtol=0
    )


@pytest.mark.parametrize("flags", CASES, ids=" ".join)
def test_batch_order_does_not_matter(flags: tuple[str, ...]) -> None:
    model, sample = shaken(*flags), batch()
    order = torch.tensor([2, 0, 1])
    moved = dict(sample, net_input={k: v[order] for k, v in sample["net_input"].items()})
    torch.testing.assert_close(log_probs(model, moved), log_probs(model, sample)[order], atol=3e-5, rtol=0)


# Incremental decoding


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
def test_incremental_equals_full_in_every_mode(fusion: tuple[str, ...], source: tuple[str, ...]) -> None:
    assert_incremental_equals_full(shaken(*source, *fusion))


@pytest.mark.parametrize("fusion", [HARD, LEARNED, SOFT], ids=" ".join)
@pytest.mark.parametrize("option", OPTIONS[1:], ids=" ".join)
def test_incremental_equals_full_with_every_option(option: tuple[str, ...], fusion: tuple[str, ...]) -> None:
    for source in SOURCES:
        assert_incremental_equals_full(shaken(*source, *fusion, *option))


@pytest.mark.parametrize("option", ATT_OPTIONS, ids=" ".join)
def test_incremental_equals_full_with_options_of_the_attention(option: tuple[str, ...]) -> None:
    assert_incremental_equals_full(shaken(*ATT, *HARD, *option))


# Which depth the query comes from


@pytest.mark.parametrize("idx", [0, 1, 2, 3, -1, -2, -3, -4])
def test_each_layer_index_and_its_negative(idx: int) -> None:
    flags = (*ATT, *HARD, "--decoder-layers", "4", *PRE_NORM)
    assert_equals_oracle((*flags, f"--sf-idx={idx}"), idx)


def test_the_default_layer_index_is_the_last_layer() -> None:
    flags = (*ATT, *HARD, "--decoder-layers", "4")
    default = log_probs(shaken(*flags), batch())
    assert torch.equal(log_probs(shaken(*flags, "--sf-idx", "3"), batch()), default)
    assert torch.equal(log_probs(shaken(*flags, "--sf-idx", "-1"), batch()), default)
    assert not torch.allclose(log_probs(shaken(*flags, "--sf-idx", "2"), batch()), default)


def test_layerdrop_keeps_the_depth_of_the_query() -> None:
    """Also where the query's own layer is dropped: the stream passes it by."""
    flags = (*ATT, *HARD, "--decoder-layers", "4", "--decoder-layerdrop", "0.5", "--sf-idx", "1")
    model, sample = shaken(*flags), batch()
    model.train()
    net, outcomes = sample["net_input"], set()
    with torch.no_grad():
        for seed in range(12):
            out = model.encoder(net["src_tokens"])
            torch.manual_seed(seed)
            dropped = (torch.empty(4).uniform_() <= 0.5).tolist()
            torch.manual_seed(seed)
            _, extra = model.decoder(net["prev_output_tokens"], encoder_out=out)
            streams = extra["inner_states"]
            assert len(streams) == 5
            assert [b is a for a, b in itertools.pairwise(streams)] == dropped
            outcomes.add(dropped[1])
            torch.manual_seed(seed)
            probs = log_probs(model.double(), sample)
            torch.manual_seed(seed)
            torch.testing.assert_close(probs, oracle(model, sample, flags, 1), atol=1e-10, rtol=0)
            model.float()
    assert outcomes == {True, False}


def test_training_works_when_every_layer_is_dropped() -> None:
    model = build(*ATT, *HARD, "--decoder-layerdrop", "1.0")[0].train()
    assert list(model.decoder.layers) == [skip_decoder_layer] * 2
    grads = gradients(model, batch())
    assert grads["decoder.layers.0.fc1.weight"] is None
    assert all(g is None or g.isfinite().all() for g in grads.values())


# What the gradient reaches


def reached(model: Any, sample: dict[str, Any]) -> set[str]:
    """Parameters that the surface logits alone send a gradient to."""
    model.zero_grad()
    logits, _ = model(**sample["net_input"])
    src_logits = logits[..., VOCAB : 2 * VOCAB]
    weight = torch.randn(src_logits.shape, dtype=src_logits.dtype, generator=torch.Generator().manual_seed(0))
    (src_logits * weight).sum().backward()
    return {n for n, p in model.named_parameters() if p.grad is not None and p.grad.abs().max() > 1e-6}


SURFACE_ALONE = {
    "decoder.sf_attn.q_proj.weight",
    "decoder.sf_attn.q_proj.bias",
    "decoder.sf_attn.k_proj.weight",  # not its bias: the softmax ignores a constant
    "decoder.sf_attn.v_proj.weight",
    "decoder.sf_attn.v_proj.bias",
    "decoder.sf_attn.out_proj.weight",
    "decoder.sf_attn.out_proj.bias",
    "decoder.fc1.weight",
    "decoder.fc1.bias",
    "decoder.fc2.weight",
    "decoder.fc2.bias",
    "decoder.src_out_dim.weight",
    "decoder.output_projection.weight",
    "encoder.embed_tokens.weight",
}
EVERYTHING = ("--sf-linear", "--encoder-learned-pos", "--decoder-learned-pos", "--layernorm-embedding")


@pytest.mark.parametrize("option", [(), PRE_NORM, ("--layer-wise-attention",)], ids=" ".join)
def test_gradients_of_the_surface_branch_reach_the_published_parameters(option: tuple[str, ...]) -> None:
    model = shaken(*ATT, *HARD, *EVERYTHING, *option).double()
    assert reached(model, batch()) == SURFACE_ALONE


def test_gradients_with_positions_also_reach_the_encoder_input() -> None:
    model = shaken(*ATT, *HARD, *EVERYTHING, "--sf-posedemb").double()
    assert reached(model, batch()) == SURFACE_ALONE | {
        "encoder.embed_positions.weight",
        "encoder.layernorm_embedding.weight",
        "encoder.layernorm_embedding.bias",
    }


def test_gradients_without_detach_reach_the_encoder_and_the_decoder_up_to_the_query() -> None:
    model = shaken(*ATT, *HARD, *EVERYTHING, "--sf-no-detach", "--sf-idx", "0", *PRE_NORM).double()
    names = {n for n, _ in model.named_parameters()}
    unreached = {n for n in names if n.startswith(("decoder.layers.1.", "decoder.layer_norm."))}
    unreached |= {n for n in names if n.endswith("k_proj.bias")} | {"decoder.tgt_out_dim.weight"}
    assert reached(model, batch()) == names - unreached


@pytest.mark.parametrize("source", [MEAN, MAX], ids=" ".join)
def test_gradients_of_pooled_sources_reach_only_the_embedding(source: tuple[str, ...]) -> None:
    model = shaken(*source, *HARD, *EVERYTHING).double()
    assert reached(model, batch()) == {n for n in SURFACE_ALONE if "sf_attn" not in n}


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", [HARD, LEARNED, SOFT], ids=" ".join)
def test_activation_checkpointing_changes_no_gradient(
    fusion: tuple[str, ...], source: tuple[str, ...]
) -> None:
    flags = (*source, *fusion, "--dropout", "0.2", "--attention-dropout", "0.1", SHARED)
    grads = []
    for option in ((), ("--checkpoint-activations",)):
        model = build(*flags, *option)[0].train()
        torch.manual_seed(5)
        grads.append(gradients(model, batch()))
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-5, rtol=1e-4, msg=name)


# Dropout


def test_dropout_of_the_shared_feed_forward_layer() -> None:
    """On the hidden layer with --activation-dropout, on its output with --dropout, never on the residual."""
    model = shaken(*ATT, *HARD, "--dropout", "0.3", "--activation-dropout", "0.2")
    decoder, z = model.decoder, torch.randn(50, 60, 16)
    clean = decoder.head(z, "tgt")
    decoder.train()
    decoder.activation_dropout.p = 0.0
    change = decoder.head(z, "tgt") - z
    kept = change != 0
    assert abs(kept.float().mean().item() - 0.7) < 0.01
    torch.testing.assert_close(change[kept], ((clean - z) / 0.7)[kept], atol=1e-5, rtol=1e-5)
    decoder.dropout_module.p, decoder.activation_dropout.p = 0.0, 1.0
    torch.testing.assert_close(decoder.head(z, "tgt"), z + decoder.fc2.bias)


def test_attention_dropout_reaches_the_surface_attention() -> None:
    model = build(*ATT, *HARD, "--attention-dropout", "0.25")[0]
    assert model.decoder.sf_attn.dropout_module.p == 0.25
    assert build(*ATT, *HARD)[0].decoder.sf_attn.dropout_module.p == 0


def test_the_two_branches_are_dropped_out_independently() -> None:
    model = shaken(*MEAN, *HARD, "--dropout", "0.5").train()
    z = torch.randn(20, 30, 16)
    h, r = model.decoder.head(z, "tgt") - z, model.decoder.head(z, "src") - z
    assert 0.4 < ((h == 0) == (r == 0)).float().mean() < 0.6


# Interface


def test_a_learned_gate_adds_two_columns_to_the_logits() -> None:
    model, sample = shaken(*ATT, *LEARNED), batch()
    logits, _ = model(**sample["net_input"])
    assert logits.shape[-1] == 2 * VOCAB + 2
    gates = logits[..., -2:]
    assert ((gates > 0) & (gates < 1)).all()
    torch.testing.assert_close(gates.sum(-1), torch.ones(gates.shape[:2]))
    assert shaken(*ATT, *HARD)(**sample["net_input"])[0].shape[-1] == 2 * VOCAB
    for fusion in (SOFT, (*HARD, "--sf-renormalize"), (*LEARNED, "--sf-renormalize")):
        assert shaken(*ATT, *fusion)(**sample["net_input"])[0].shape[-1] == VOCAB


@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
def test_output_layer_of_the_features_equals_forward(fusion: tuple[str, ...]) -> None:
    model, net = shaken(*ATT, *fusion), batch()["net_input"]
    features, _ = model(**net, features_only=True)
    torch.testing.assert_close(model.decoder.output_layer(features), model(**net)[0])


@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
def test_probabilities_are_float32_also_of_a_slice_of_the_logits(fusion: tuple[str, ...]) -> None:
    model, net = shaken(*MAX, *fusion), batch()["net_input"]
    logits, extra = model(**net)
    full = model.get_normalized_probs((logits, extra), log_probs=True)
    part = model.get_normalized_probs((logits[:, 2:3], extra), log_probs=True)
    assert torch.equal(part, full[:, 2:3])
    assert full.dtype == torch.float32


def test_a_decoder_without_source_is_refused() -> None:
    model = shaken(*ATT, *HARD)
    with pytest.raises(ValueError, match="encoder_out is None"):
        model.decoder(batch()["net_input"]["prev_output_tokens"])


def test_fused_loss_is_linear_in_the_gate() -> None:
    """The hard loss is g LS(target) + (1-g) LS(surface)."""
    losses = [loss(shaken(*ATT, "--sf-gate", gate).double(), batch()).item() for gate in ("1", "0.5", "0.25")]
    assert losses[2] == pytest.approx(losses[0] + 1.5 * (losses[1] - losses[0]), rel=1e-10)
