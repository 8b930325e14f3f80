"""Defaults and meaning of flags, YAML keys and the arguments of old checkpoints.

Also tests ``config/defaults.py``.
"""

import argparse
import copy
from argparse import Namespace
from dataclasses import fields

import pytest
from fairseq.models.transformer import TransformerConfig

from surface_fusion.config.defaults import fill_defaults
from surface_fusion.config.flags import SurfaceFusionConfig
from surface_fusion.models.architectures import base_architecture
from tests.helpers.tiny import SIZES, build, parse

ATT = ("--surfacefusion", "att")
INHERITED = {f.name for f in fields(TransformerConfig)}
OURS = [f for f in fields(SurfaceFusionConfig) if f.name not in INHERITED]


def config(*flags: str) -> SurfaceFusionConfig:
    return SurfaceFusionConfig.from_namespace(parse(*SIZES, *flags))


def parser() -> argparse.ArgumentParser:
    out = argparse.ArgumentParser()
    SurfaceFusionConfig.add_args(out)
    return out


# Flags


@pytest.mark.parametrize("name", [f.name for f in OURS])
def test_every_field_is_a_flag_with_a_help_line(name: str) -> None:
    action = next(a for a in parser()._actions if a.dest == name)
    assert action.option_strings == ["--" + name.replace("_", "-")]
    assert action.help and len(action.help) > 10


def test_the_help_can_be_printed() -> None:
    text = parser().format_help()
    assert "--sf-gate" in text and "--encoder-layers" in text and "{att,mean,max}" in text


def test_the_help_says_that_gate_zero_is_learned() -> None:
    action = next(a for a in parser()._actions if a.dest == "sf_gate")
    assert "0 (the default, as published) means a gate learned per token" in str(action.help)


def test_all_published_flags_exist() -> None:
    flags = {option for action in parser()._actions for option in action.option_strings}
    published = "surfacefusion sf-mode sf-gate sf-softmax-tau sf-linear sf-ffn sf-no-posedemb"
    published += " sf-attention-heads sf-idx layer-wise-attention"
    assert {f"--{name}" for name in published.split()} <= flags


def test_defaults_equal_the_published_command_line() -> None:
    args = parse(*ATT)
    assert args.sf_ffn is True and args.sf_no_posedemb is True
    assert (args.sf_attention_heads, args.sf_softmax_tau, args.sf_gate) == (1, 1.0, 0.0)
    assert (args.sf_mode, args.sf_linear, args.layer_wise_attention) == ("hard", False, False)
    assert args.attention_dropout == 0.1
    assert args.sf_idx is None and not args.sf_pool_published
    assert not args.sf_renormalize and not args.sf_no_detach
    assert parse().attention_dropout == 0.0
    assert parse(*ATT, "--attention-dropout", "0.3").attention_dropout == 0.3


@pytest.mark.parametrize(
    ("flags", "ffn", "no_positions"),
    [
        ((), True, True),
        (("--sf-ffn",), True, True),
        (("--sf-no-posedemb",), True, True),
        (("--sf-ffn", "--sf-no-posedemb"), True, True),
        (("--no-sf-ffn",), False, True),
        (("--sf-posedemb",), True, False),
        (("--no-sf-ffn", "--sf-posedemb"), False, False),
        (("--sf-ffn", "--no-sf-ffn"), False, True),
    ],
)
def test_switches_that_are_on_by_default(flags: tuple[str, ...], ffn: bool, no_positions: bool) -> None:
    args = parse(*ATT, *flags)
    assert (args.sf_ffn, args.sf_no_posedemb) == (ffn, no_positions)
    cfg = SurfaceFusionConfig.from_namespace(args)
    assert (cfg.sf_ffn, cfg.sf_no_posedemb) == (ffn, no_positions)


@pytest.mark.parametrize("value", ["dot", "ATT", ""])
def test_unknown_source_is_refused_by_the_parser(value: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse("--surfacefusion", value)
    assert stop.value.code == 2
    assert "invalid choice" in capsys.readouterr().err


def test_unknown_mode_is_refused_by_the_parser(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as stop:
        parse(*ATT, "--sf-mode", "softest")
    assert stop.value.code == 2
    assert "softest" in capsys.readouterr().err


# fill_defaults


@pytest.mark.parametrize(
    "flags", [(), ATT, (*ATT, "--no-sf-ffn", "--sf-posedemb"), (*ATT, "--sf-gate", "0.8", "--sf-idx", "1")]
)
def test_filling_defaults_is_idempotent(flags: tuple[str, ...]) -> None:
    args = parse(*SIZES, *flags)
    again = copy.deepcopy(args)
    fill_defaults(again)
    assert vars(again) == vars(args)
    base_architecture(again)
    assert vars(again) == vars(args)


@pytest.mark.parametrize("ffn", [True, False])
@pytest.mark.parametrize("no_positions", [True, False])
def test_old_namespaces_keep_their_settings(ffn: bool, no_positions: bool) -> None:
    args = Namespace(surfacefusion="att", sf_ffn=ffn, sf_no_posedemb=no_positions, sf_mode="soft")
    for _ in range(2):
        fill_defaults(args)
        assert (args.sf_ffn, args.sf_no_posedemb, args.sf_mode) == (ffn, no_positions, "soft")


def test_published_checkpoints_pool_as_they_were_trained_to() -> None:
    args = Namespace(surfacefusion="mean", sf_fuision_mode="hard", sf_mode="soft")
    fill_defaults(args)
    assert args.sf_pool_published is True
    assert args.sf_mode == "soft", "sf_mode is what the published model read"
    ours = Namespace(surfacefusion="mean", sf_mode="soft")
    fill_defaults(ours)
    assert ours.sf_pool_published is False


def test_published_checkpoints_with_only_the_misspelt_mode() -> None:
    args = Namespace(surfacefusion="att", sf_fuision_mode="postnorm")
    fill_defaults(args)
    assert args.sf_mode == "postnorm"


def test_a_current_setting_in_a_published_namespace_is_kept() -> None:
    args = Namespace(sf_fuision_mode="hard", sf_mode="hard", sf_pool_published=False)
    fill_defaults(args)
    assert args.sf_pool_published is False


def test_published_positions_of_transparent_attention_reach_the_surface() -> None:
    """--ta-posedemb gave the fused embedding its positions, with transparent attention or without."""
    args = Namespace(surfacefusion="att", sf_fuision_mode="hard", sf_no_posedemb=True, ta_posedemb=True)
    for _ in range(2):
        fill_defaults(args)
        assert args.sf_no_posedemb is False


def test_unattended_encoder_layers_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--layer-wise-attention", "--encoder-layers", "4")
    config(*flags, *ATT, "--sf-no-detach")
    assert not [r for r in caplog.records if r.name == "surface_fusion.config.model_checks"]
    config(*flags)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "surface_fusion.config.model_checks"]
    assert "no decoder layer attends to the last 2 encoder layers" in line


# One model does not influence the next


def test_configs_share_nothing() -> None:
    first, second = SurfaceFusionConfig(), SurfaceFusionConfig()
    first.encoder.layers = 2
    first.decoder.layers = 3
    first.quant_noise.pq = 0.5
    assert (second.encoder.layers, second.decoder.layers, second.quant_noise.pq) == (6, 6, 0.0)
    assert (SurfaceFusionConfig().encoder.layers, SurfaceFusionConfig().decoder.output_dim) == (6, 512)


def test_two_configurations_in_one_process_are_independent() -> None:
    build(*ATT, "--sf-posedemb", "--encoder-layers", "3", "--quant-noise-pq", "0.1", "--sf-linear")
    model, _ = build("--surfacefusion", "mean")
    assert len(model.encoder.layers) == 2 and model.encoder.quant_noise is None
    assert model.cfg.sf_no_posedemb is True and not hasattr(model.decoder, "sf_attn")
    plain, _ = build(arch="transformer")
    assert len(plain.encoder.layers) == 2
    assert not hasattr(TransformerConfig(), "surfacefusion")


def test_parsing_does_not_change_the_defaults() -> None:
    parse(*SIZES, *ATT, "--no-sf-ffn")
    assert parse(*ATT).sf_ffn is True
    assert parse().encoder_layers == 6
