"""What the encoder hands over as the source surface, and that it is otherwise fairseq's encoder."""

import itertools
from typing import Any

import pytest
import torch
from fairseq.models.transformer import TransformerEncoderBase
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surface_fusion.models.encoder import SurfaceFusionEncoder
from surface_fusion.modules.layerdrop import skip_encoder_layer
from tests.helpers.tiny import PAD, batch, build, gradients, pad_rows, shaken

ATT = ("--surfacefusion", "att")
MEAN, MAX = ("--surfacefusion", "mean"), ("--surfacefusion", "max")
SOURCES = [ATT, MEAN, MAX]
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")


def encode(model: Any, sample: dict[str, Any], **kwargs: Any) -> dict[str, list[Tensor]]:
    net = sample["net_input"]
    return model.encoder(net["src_tokens"], net["src_lengths"], **kwargs)


def scaled_embeddings(model: Any, sample: dict[str, Any]) -> Tensor:
    """sqrt(d) E[src], B x S x C."""
    return 4.0 * model.encoder.embed_tokens.weight[sample["net_input"]["src_tokens"]]


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize(
    "flags",
    [
        (),
        PRE_NORM,
        ("--sf-posedemb",),
        ("--layernorm-embedding",),
        ("--encoder-learned-pos",),
        ("--no-token-positional-embeddings",),
        ("--no-scale-embedding",),
        ("--encoder-layerdrop", "0.5"),
    ],
    ids=" ".join,
)
def test_everything_but_the_surface_equals_fairseq(
    source: tuple[str, ...], flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    model, sample = shaken(*source, *flags), batch()
    mine = encode(model, sample, return_all_hiddens=True)
    net = sample["net_input"]
    with monkeypatch.context() as patch:
        patch.setattr(SurfaceFusionEncoder, "forward_embedding", TransformerEncoderBase.forward_embedding)
        theirs = TransformerEncoderBase.forward(model.encoder, net["src_tokens"], net["src_lengths"], True)
    assert mine.keys() == theirs.keys()
    for key in mine.keys() - {"encoder_embedding", "fc_results"}:
        assert len(mine[key]) == len(theirs[key])
        for a, b in zip(mine[key], theirs[key], strict=True):
            torch.testing.assert_close(a, b, atol=1e-6, rtol=0)


def test_att_surface_is_the_scaled_embedding_without_positions() -> None:
    model, sample = shaken(*ATT, "--layernorm-embedding", *PRE_NORM), batch()
    surface = encode(model, sample)["encoder_embedding"][0]
    torch.testing.assert_close(surface, scaled_embeddings(model, sample))


def test_att_surface_without_embedding_scale() -> None:
    model, sample = shaken(*ATT, "--no-scale-embedding"), batch()
    surface = encode(model, sample)["encoder_embedding"][0]
    torch.testing.assert_close(surface, scaled_embeddings(model, sample) / 4)


@pytest.mark.parametrize("flags", [(), ("--layernorm-embedding",), ("--encoder-learned-pos",)], ids=" ".join)
def test_with_positions_the_surface_is_the_encoder_input(flags: tuple[str, ...]) -> None:
    model, sample = shaken(*ATT, "--sf-posedemb", *flags), batch()
    out = encode(model, sample, return_all_hiddens=True)
    real = sample["net_input"]["src_tokens"].ne(PAD)
    surface, x = out["encoder_embedding"][0], out["encoder_states"][0].transpose(0, 1)
    torch.testing.assert_close(surface[real], x[real])
    assert (surface - scaled_embeddings(model, sample)).abs().max() > 0.1


@pytest.mark.parametrize("positions", [False, True])
def test_mean_and_max_pool_real_tokens(positions: bool) -> None:
    flags = ("--sf-posedemb",) if positions else ()
    sample = batch()
    tokens = sample["net_input"]["src_tokens"]
    for source in (MEAN, MAX):
        model = shaken(*source, *flags)
        out = encode(model, sample, return_all_hiddens=True)
        embed = out["encoder_states"][0].transpose(0, 1) if positions else scaled_embeddings(model, sample)
        surface = out["encoder_embedding"][0]
        assert surface.shape == (3, 1, 16)
        for i in range(3):
            rows = embed[i][tokens[i].ne(PAD)]
            expected = rows.mean(0) if source is MEAN else rows.amax(0)
            torch.testing.assert_close(surface[i, 0], expected)


@pytest.mark.parametrize("source", [MEAN, MAX], ids=" ".join)
def test_published_pooling_reads_only_ids_from_50(source: tuple[str, ...]) -> None:
    model, sample = shaken(*source, "--sf-pool-published"), batch()
    tokens = sample["net_input"]["src_tokens"]
    tokens[0, -3:-1] = torch.tensor([50, 49])
    tokens[1].clamp_(max=49)
    surface = encode(model, sample)["encoder_embedding"][0]
    embed = scaled_embeddings(model, sample)
    for i in range(3):
        rows = embed[i][tokens[i].ge(50)]
        if source is MEAN:
            expected = rows.mean(0) if len(rows) else torch.zeros(16)
        else:
            expected = torch.cat([rows, torch.zeros(1, 16)]).amax(0)
        torch.testing.assert_close(surface[i, 0], expected)


@pytest.mark.parametrize("flags", [(), PRE_NORM, ("--layernorm-embedding",)], ids=" ".join)
@pytest.mark.parametrize("positions", [False, True])
def test_the_surface_shares_the_dropout_mask_of_the_encoder_input(
    flags: tuple[str, ...], positions: bool
) -> None:
    option = ("--sf-posedemb",) if positions else ()
    model, sample = shaken(*ATT, "--dropout", "0.4", *flags, *option), batch((40, 38, 35), (3, 3, 3))
    clean = encode(model, sample, return_all_hiddens=True)
    torch.manual_seed(3)
    out = encode(model.train(), sample, return_all_hiddens=True)
    real = sample["net_input"]["src_tokens"].ne(PAD)
    surface, x = out["encoder_embedding"][0][real], out["encoder_states"][0].transpose(0, 1)[real]
    kept = x != 0
    assert torch.equal(surface != 0, kept)
    assert 0.55 < kept.float().mean() < 0.65
    clean_x = clean["encoder_states"][0].transpose(0, 1)[real]
    torch.testing.assert_close(x[kept], clean_x[kept] / 0.6)
    torch.testing.assert_close(surface[kept], clean["encoder_embedding"][0][real][kept] / 0.6)


def test_the_encoder_input_is_dropped_out_as_by_fairseq_under_one_seed() -> None:
    fused, plain = shaken(*ATT, "--dropout", "0.4"), shaken("--dropout", "0.4")
    plain.encoder.load_state_dict(fused.encoder.state_dict())
    outs = []
    for model in (fused, plain):
        torch.manual_seed(7)
        outs.append(encode(model.train(), batch(), return_all_hiddens=True)["encoder_out"][0])
    torch.testing.assert_close(*outs, atol=1e-6, rtol=0)


@pytest.mark.parametrize("source", [MEAN, MAX], ids=" ".join)
def test_pooled_vectors_have_their_own_dropout_mask(source: tuple[str, ...]) -> None:
    model, sample = shaken(*source, "--dropout", "0.5"), batch((6,) * 40, (3,) * 40)
    clean = encode(model, sample)["encoder_embedding"][0]
    surface = encode(model.train(), sample)["encoder_embedding"][0]
    kept = surface != 0
    assert 0.4 < kept.float().mean() < 0.6
    torch.testing.assert_close(surface[kept], clean[kept] * 2)


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
def test_full_dropout_is_zero_not_nan(source: tuple[str, ...]) -> None:
    model, sample = build(*source, "--dropout", "1.0")[0].train(), batch()
    out = encode(model, sample, return_all_hiddens=True)
    assert (out["encoder_embedding"][0] == 0).all()
    assert all(grad is None or grad.isfinite().all() for grad in gradients(model, sample).values())


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@settings(max_examples=15, deadline=None)
@given(st.lists(st.integers(1, 9), min_size=1, max_size=4), st.booleans(), st.integers(0, 4))
def test_padding_and_its_side_do_not_change_the_surface(
    source: tuple[str, ...], lengths: list[int], left: bool, extra: int
) -> None:
    model = shaken(*source)
    sample = batch(tuple(lengths), (2,) * len(lengths))
    rows = [row[row.ne(PAD)] for row in sample["net_input"]["src_tokens"]]
    alone = [model.encoder(row[None]) for row in rows]
    tokens = pad_rows(rows, left, extra)
    out = model.encoder(tokens)
    for i, single in enumerate(alone):
        real = tokens[i].ne(PAD)
        torch.testing.assert_close(
            out["encoder_out"][0][real, i], single["encoder_out"][0][:, 0], atol=2e-5, rtol=0
        )
        surface = out["encoder_embedding"][0][i]
        torch.testing.assert_close(
            surface[real] if source is ATT else surface, single["encoder_embedding"][0][0], atol=1e-6, rtol=0
        )


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
def test_reordering_includes_the_surface(source: tuple[str, ...]) -> None:
    model, sample = shaken(*source), batch()
    out = encode(model, sample)
    order = torch.tensor([2, 0, 0, 1])
    moved = model.encoder.reorder_encoder_out(out, order)
    assert torch.equal(moved["encoder_embedding"][0], out["encoder_embedding"][0][order])
    assert torch.equal(moved["encoder_out"][0], out["encoder_out"][0][:, order])


@pytest.mark.parametrize("flags", [(), PRE_NORM], ids=" ".join)
def test_a_dropped_layer_returns_its_input(flags: tuple[str, ...]) -> None:
    model, sample = shaken(*ATT, "--encoder-layers", "5", "--encoder-layerdrop", "0.5", *flags), batch()
    model.train()
    seen = set()
    for seed in range(10):
        torch.manual_seed(seed)
        dropped = (torch.empty(5).uniform_() <= 0.5).tolist()
        torch.manual_seed(seed)
        states = encode(model, sample, return_all_hiddens=True)["encoder_states"]
        assert len(states) == 6
        assert [after is before for before, after in itertools.pairwise(states)] == dropped
        seen.add(tuple(dropped))
    assert len(seen) > 5


def test_layerdrop_computes_what_fairseq_computes_under_one_seed() -> None:
    flags = ("--encoder-layers", "5", "--encoder-layerdrop", "0.4", "--decoder-layers", "5")
    flags = (*flags, "--decoder-layerdrop", "0.4")
    fused, plain = shaken(*ATT, *flags, "--sf-mode", "soft"), shaken(*flags)
    plain.load_state_dict({k: v for k, v in fused.state_dict().items() if k in plain.state_dict()})
    sample = batch()
    for seed in range(8):
        tops = []
        for model in (fused, plain):
            torch.manual_seed(seed)
            out = encode(model.train(), sample)
            _, extra = model.decoder(sample["net_input"]["prev_output_tokens"], encoder_out=out)
            tops += [out["encoder_out"][0], extra["inner_states"][-1]]
        torch.testing.assert_close(tops[:2], tops[2:], atol=1e-5, rtol=0)


def test_all_layers_dropped_still_trains() -> None:
    model = build(*ATT, "--encoder-layerdrop", "1.0", "--decoder-layerdrop", "1.0")[0].train()
    assert list(model.encoder.layers) == [skip_encoder_layer] * 2
    assert all(g is None or g.isfinite().all() for g in gradients(model, batch()).values())


def test_quantisation_noise_does_not_change_the_surface() -> None:
    model, sample = shaken(*ATT, "--quant-noise-pq", "0.2"), batch()
    out = encode(model, sample, return_all_hiddens=True)
    torch.testing.assert_close(out["encoder_embedding"][0], scaled_embeddings(model, sample))
    positions = model.encoder.embed_positions(sample["net_input"]["src_tokens"])
    noisy = model.encoder.quant_noise(scaled_embeddings(model, sample) + positions)
    real = sample["net_input"]["src_tokens"].ne(PAD)
    torch.testing.assert_close(out["encoder_states"][0].transpose(0, 1)[real], noisy[real])


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
def test_given_token_embeddings_are_used(source: tuple[str, ...]) -> None:
    model, sample = shaken(*source), batch()
    tokens = sample["net_input"]["src_tokens"]
    given_out = model.encoder(tokens, token_embeddings=model.encoder.embed_tokens(tokens))
    plain_out = model.encoder(tokens)
    for key in ("encoder_out", "encoder_embedding"):
        assert torch.equal(given_out[key][0], plain_out[key][0])
    doubled = model.encoder(tokens, token_embeddings=2 * model.encoder.embed_tokens(tokens))
    torch.testing.assert_close(doubled["encoder_embedding"][0], 2 * plain_out["encoder_embedding"][0])


@pytest.mark.parametrize("source", [MEAN, MAX], ids=" ".join)
def test_a_source_of_padding_alone_has_a_finite_surface(source: tuple[str, ...]) -> None:
    model, sample = shaken(*source), batch()
    sample["net_input"]["src_tokens"][1] = PAD
    assert (encode(model, sample)["encoder_embedding"][0][1] == 0).all()
