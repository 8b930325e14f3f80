"""Word dropout drops whole words, in training only, on either side."""

import pytest
import torch

from surface_fusion.decoding.eligibility import why_not_fast
from surface_fusion.modules.word_dropout import WordDropout
from surface_fusion.packed.eligibility import why_not_packed
from surface_fusion.packed.flat_parameters import FlatParameters
from tests.helpers.tiny import (
    PAD,
    SHARED,
    assert_incremental_equals_full,
    batch,
    build,
    log_probs,
    loss,
    shaken,
)


def test_rows_are_dropped_whole() -> None:
    torch.manual_seed(0)
    x = torch.ones(200, 30, 4)
    out = WordDropout(0.2).train()(x)
    assert out.eq(out[..., :1]).all()
    assert set(out.unique().tolist()) == {0.0, 1.25}
    assert out.eq(0).float().mean().item() == pytest.approx(0.2, abs=0.02)


def test_evaluation_drops_nothing() -> None:
    x = torch.randn(3, 4)
    assert WordDropout(0.9).eval()(x) is x


@pytest.mark.parametrize("side", ["source", "target"])
@pytest.mark.parametrize("surface", [(), ("--surfacefusion", "att", "--sf-gate", "0.8")], ids=str)
def test_in_the_model(side: str, surface: tuple[str, ...]) -> None:
    """The published source side kept a word with probability p and lost the padding mask."""
    model, _ = build(f"--{side}-word-dropout", "0.3", SHARED, *surface)
    plain, _ = build(SHARED, *surface)
    plain.load_state_dict(model.state_dict())
    sample = batch()
    assert torch.equal(log_probs(model.eval(), sample), log_probs(plain.eval(), sample))
    torch.manual_seed(0)
    losses = {loss(model.train(), sample).item() for _ in range(4)}
    assert len(losses) == 4
    mask = model.encoder(**{k: sample["net_input"][k] for k in ("src_tokens", "src_lengths")})
    assert torch.equal(mask["encoder_padding_mask"][0], sample["net_input"]["src_tokens"].eq(PAD))


def test_the_surface_loses_the_word_too() -> None:
    model, _ = build("--source-word-dropout", "0.5", SHARED, "--surfacefusion", "att", "--sf-gate", "0.8")
    torch.manual_seed(1)
    net = batch()["net_input"]
    surface = model.train().encoder(net["src_tokens"], net["src_lengths"])["encoder_embedding"][0]
    dropped = surface.eq(0).all(-1) & net["src_tokens"].ne(PAD)
    assert 0 < dropped.sum() < net["src_tokens"].ne(PAD).sum()


def test_training_uses_the_modules() -> None:
    model, _ = build("--target-word-dropout", "0.3", SHARED)
    flat = FlatParameters.of(model.parameters())
    assert flat is not None and why_not_packed(model) == "word dropout"


@pytest.mark.parametrize("plain", [(), ("--sf-plain",)], ids=str)
def test_a_model_trained_with_word_dropout_decodes(plain: tuple[str, ...]) -> None:
    """The fast path looked for a matrix where target words are dropped."""
    model = shaken("--target-word-dropout", "0.1", SHARED, *plain)
    assert (why_not_fast(model.decoder) is None) == (not plain)
    assert_incremental_equals_full(model)
