"""Sizes of the named architectures."""

import argparse

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY

from surface_fusion.encoder_fusion import methods
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel
from tests.helpers.tiny import ARCH, parse

# Layers of either stack, width, inner width, heads, dropout, attention dropout without and with fusion.
SIZES = {
    "": (6, 512, 2048, 8, 0.1, 0.0, 0.1),
    "_tiny": (4, 128, 256, 4, 0.1, 0.0, 0.1),
    "_iwslt_de_en": (6, 512, 1024, 4, 0.1, 0.0, 0.1),
    "_wmt_en_de_big": (6, 1024, 4096, 16, 0.3, 0.1, 0.1),
    "_vaswani_wmt_en_de_big": (6, 1024, 4096, 16, 0.3, 0.0, 0.1),
}


@pytest.mark.parametrize("name", SIZES)
@pytest.mark.parametrize("fused", [False, True])
def test_sizes_of_the_named_architectures(name: str, fused: bool) -> None:
    layers, dim, ffn, heads, dropout, plain_attention, fused_attention = SIZES[name]
    args = parse(*(("--surfacefusion", "att") if fused else ()), arch=ARCH + name)
    for stack in ("encoder", "decoder"):
        assert getattr(args, f"{stack}_layers") == layers
        assert getattr(args, f"{stack}_embed_dim") == dim
        assert getattr(args, f"{stack}_ffn_embed_dim") == ffn
        assert getattr(args, f"{stack}_attention_heads") == heads
        assert getattr(args, f"{stack}_normalize_before") is False
    assert args.decoder_output_dim == args.decoder_input_dim == dim
    assert args.dropout == dropout
    assert args.attention_dropout == (fused_attention if fused else plain_attention)
    assert args.sf_ffn is True and args.sf_no_posedemb is True


@pytest.mark.parametrize("name", ["", "_iwslt_de_en", "_wmt_en_de_big", "_vaswani_wmt_en_de_big"])
def test_without_fusion_every_setting_is_that_of_fairseq(name: str) -> None:
    ours, theirs = parse(arch=ARCH + name), parse(arch="transformer" + name)
    different = {k for k, v in vars(theirs).items() if k != "arch" and getattr(ours, k, None) != v}
    assert not different


@pytest.mark.parametrize("name", SIZES)
def test_flags_override_the_architecture(name: str) -> None:
    flags = ("--encoder-layers", "2", "--decoder-ffn-embed-dim", "64", "--dropout", "0.25")
    args = parse(*flags, "--surfacefusion", "att", "--attention-dropout", "0", arch=ARCH + name)
    assert (args.encoder_layers, args.decoder_ffn_embed_dim, args.dropout) == (2, 64, 0.25)
    assert args.attention_dropout == 0


def test_all_architectures_are_registered_to_one_model() -> None:
    ours = {name for name, model in ARCH_MODEL_REGISTRY.items() if model is SurfaceFusionModel}
    assert ours == {ARCH + name for name in SIZES}


def test_decoder_widths_default_to_those_of_the_encoder() -> None:
    args = parse("--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "96", "--surfacefusion", "att")
    assert (args.decoder_embed_dim, args.decoder_ffn_embed_dim, args.decoder_output_dim) == (64, 96, 64)


def test_parsing_draws_no_random_numbers() -> None:
    torch.manual_seed(0)
    before = torch.get_rng_state()
    parse("--surfacefusion", "att")
    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("name", SIZES)
def test_a_default_that_depends_on_surfacefusion_is_logged_once(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Attention dropout; nothing is said where it is given, or where the plain model has the same."""

    def said(*flags: str) -> list[str]:
        caplog.clear()
        with caplog.at_level("INFO", "surface_fusion"):
            parse(*flags, arch=ARCH + name)
        return [r.getMessage() for r in caplog.records if "--attention-dropout" in r.getMessage()]

    plain_attention = SIZES[name][-2]
    lines = said("--surfacefusion", "att")
    assert len(lines) == (plain_attention != 0.1)
    for line in lines:
        assert line.startswith("--attention-dropout 0.1: the default with --surfacefusion")
        assert f"without --surfacefusion it is {plain_attention}" in line
    assert not said("--surfacefusion", "att", "--attention-dropout", "0.1")
    assert not said()


def test_no_other_default_depends_on_a_fusion_flag() -> None:
    """But for the flag itself, what it is another spelling of, and attention dropout."""
    plain = vars(parse())
    for flags in (
        ("--surfacefusion", "att"),
        ("--surfacefusion", "mean"),
        ("--layer-wise-attention",),
        *(("--encoder-fusion", method) for method in methods()),
        ("--transparent-attention", "--fine-grained-ta", "--ta-source-embedding", "--ta-ffn"),
    ):
        given = {flag[2:].replace("-", "_") for flag in flags} | {
            "encoder_fusion_embedding",
            "encoder_fusion",
        }
        different = {name for name, value in vars(parse(*flags)).items() if plain.get(name) != value}
        expected = {"attention_dropout"} if "--surfacefusion" in flags else set()
        assert different - given == expected, flags


def test_the_help_shows_the_default_with_surfacefusion() -> None:
    parser = argparse.ArgumentParser()
    SurfaceFusionModel.add_args(parser)
    text = " ".join(parser.format_help().split())
    assert "default 0.1 with --surfacefusion" in text
