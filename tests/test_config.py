"""Flags, YAML keys and old checkpoints' arguments, and what each becomes."""

import argparse
import copy
from argparse import Namespace
from dataclasses import fields
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.models.transformer import TransformerConfig
from omegaconf import OmegaConf, open_dict
from tiny import ARCH, SIZES, batch, build, data_folder, log_probs, parse

from surface_fusion.architectures import base_architecture
from surface_fusion.config import SurfaceFusionConfig
from surface_fusion.defaults import fill_defaults
from surface_fusion.errors import SurfaceFusionError

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


def test_published_flags_are_all_there() -> None:
    flags = {option for action in parser()._actions for option in action.option_strings}
    published = "surfacefusion sf-mode sf-gate sf-softmax-tau sf-linear sf-ffn sf-no-posedemb"
    published += " sf-attention-heads sf-idx layer-wise-attention"
    assert {f"--{name}" for name in published.split()} <= flags


def test_defaults_are_what_the_published_command_line_did() -> None:
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
def test_filling_defaults_twice_changes_nothing(flags: tuple[str, ...]) -> None:
    args = parse(*SIZES, *flags)
    again = copy.deepcopy(args)
    fill_defaults(again)
    assert vars(again) == vars(args)
    base_architecture(again)
    assert vars(again) == vars(args)


@pytest.mark.parametrize("ffn", [True, False])
@pytest.mark.parametrize("no_positions", [True, False])
def test_old_namespaces_keep_what_they_say(ffn: bool, no_positions: bool) -> None:
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


def test_a_setting_of_ours_in_a_published_namespace_is_respected() -> None:
    args = Namespace(sf_fuision_mode="hard", sf_mode="hard", sf_pool_published=False)
    fill_defaults(args)
    assert args.sf_pool_published is False


def test_published_positions_of_transparent_attention_reach_the_surface() -> None:
    """--ta-posedemb gave the fused embedding its positions, with transparent attention or without."""
    args = Namespace(surfacefusion="att", sf_fuision_mode="hard", sf_no_posedemb=True, ta_posedemb=True)
    for _ in range(2):
        fill_defaults(args)
        assert args.sf_no_posedemb is False


def test_encoder_layers_that_nothing_attends_to_are_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    flags = ("--layer-wise-attention", "--encoder-layers", "4")
    config(*flags, *ATT, "--sf-no-detach")
    assert not [r for r in caplog.records if r.name == "surface_fusion.config"]
    config(*flags)
    (line,) = [r.getMessage() for r in caplog.records if r.name == "surface_fusion.config"]
    assert "no decoder layer attends to the last 2 encoder layers" in line


# Bad values: one clear line each, with the value in it


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--sf-gate", "1.5"), "--sf-gate 1.5 is outside [0, 1]"),
        (("--sf-gate=-0.1",), "--sf-gate -0.1 is outside [0, 1]"),
        (("--sf-gate", "nan"), "--sf-gate nan is outside [0, 1]"),
        (("--sf-attention-heads", "3"), "--sf-attention-heads 3 does not divide --decoder-embed-dim 16"),
        (("--sf-attention-heads", "0"), "--sf-attention-heads 0 does not divide"),
        (("--sf-attention-heads=-1",), "--sf-attention-heads -1 does not divide"),
        (("--sf-idx", "2"), "--sf-idx 2 is out of range for 2 decoder layers; give a value from -2 to 1"),
        (("--sf-idx=-3",), "--sf-idx -3 is out of range for 2 decoder layers"),
        (("--decoder-layers", "0"), "--sf-idx -1 is out of range for 0 decoder layers"),
        (("--sf-mode", "soft", "--sf-renormalize"), "--sf-renormalize belongs to --sf-mode hard; soft is"),
        (("--adaptive-softmax-cutoff", "10,20"), "--adaptive-softmax-cutoff [10, 20] cannot be used"),
        (
            ("--encoder-attention-heads", "3"),
            "--encoder-attention-heads 3 does not divide --encoder-embed-dim 16",
        ),
        (
            ("--decoder-attention-heads", "5"),
            "--decoder-attention-heads 5 does not divide --decoder-embed-dim 16",
        ),
        (
            ("--layer-wise-attention", "--encoder-layers", "1"),
            "needs an encoder layer for each decoder layer, got 1 encoder and 2 decoder layers",
        ),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_bad_values_are_named(flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(SurfaceFusionError) as error:
        build(*ATT, *flags)
    assert text in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("source", ["mean", "max"])
@pytest.mark.parametrize("option", ["--encoder-embed-dim", "--decoder-output-dim"])
def test_pooled_sources_need_equal_widths(source: str, option: str) -> None:
    sizes = ("--encoder-embed-dim", "16", "--decoder-embed-dim", "16", option, "24")
    with pytest.raises(SurfaceFusionError, match=f"--surfacefusion {source} needs .*24"):
        build("--surfacefusion", source, *sizes)


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"surfacefusion": "dot"}, "--surfacefusion dot: unknown, choose one of att, mean, max"),
        ({"sf_mode": "softest"}, "--sf-mode softest: unknown, choose one of hard, soft, postnorm, soft_5"),
        ({"encoder_fusion": "mix"}, "--encoder-fusion mix: unknown, choose one of average, concat, dwatt, "),
        ({"target_word_dropout": 1.0}, "--target-word-dropout 1.0 is no probability below 1"),
        ({"addtional_source_output": "final"}, "--addtional-source-output final"),
    ],
    ids=str,
)
def test_bad_values_that_only_a_namespace_can_hold_are_named(changes: dict[str, Any], text: str) -> None:
    args = parse(*SIZES, *ATT)
    vars(args).update(changes)
    with pytest.raises(SurfaceFusionError) as error:
        SurfaceFusionConfig.from_namespace(args)
    assert text in str(error.value)


def test_a_plain_transformer_does_not_mind_fusion_flags() -> None:
    cfg = config("--sf-gate", "0.8", "--adaptive-softmax-cutoff", "10,20")
    assert cfg.surfacefusion is None and not cfg.learned_gate


@pytest.mark.parametrize(
    ("flags", "learned"),
    [
        (ATT, True),
        ((*ATT, "--sf-gate", "0"), True),
        ((*ATT, "--sf-gate", "0.8"), False),
        ((*ATT, "--sf-mode", "soft"), False),
        ((*ATT, "--sf-renormalize"), True),
    ],
)
def test_when_the_gate_is_learned(flags: tuple[str, ...], learned: bool) -> None:
    assert config(*flags).learned_gate is learned


# YAML


def yaml_model(values: dict[str, Any], seed: int = 1) -> Any:
    """The model that ``fairseq-hydra-train`` builds from a config's ``model`` section."""
    cfg = OmegaConf.create({"model": {"_name": ARCH, **values}})
    OmegaConf.set_struct(cfg, True)
    task = tasks.setup_task(parse(data=data_folder()))
    torch.manual_seed(seed)
    return task.build_model(cfg.model)


FLAT = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "dropout": 0,
    "attention_dropout": 0,
}
NESTED = {
    "encoder": {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 2},
    "decoder": {"layers": 2, "attention_heads": 2},
    "dropout": 0,
    "attention_dropout": 0,
}


@pytest.mark.parametrize("sizes", [FLAT, NESTED], ids=["flat", "nested"])
@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({}, ()),
        ({"surfacefusion": "att", "sf_gate": 0.8}, (*ATT, "--sf-gate", "0.8")),
        (
            {"surfacefusion": "att", "sf_ffn": False, "sf_no_posedemb": False, "sf_idx": -2},
            (*ATT, "--no-sf-ffn", "--sf-posedemb", "--sf-idx", "-2"),
        ),
        (
            {"surfacefusion": "att", "no_sf_ffn": True, "sf_posedemb": True, "sf_attention_heads": 4},
            (*ATT, "--no-sf-ffn", "--sf-posedemb", "--sf-attention-heads", "4"),
        ),
        (
            {"surfacefusion": "mean", "sf_mode": "soft", "sf_softmax_tau": 0.5, "share_all_embeddings": True},
            (
                "--surfacefusion",
                "mean",
                "--sf-mode",
                "soft",
                "--sf-softmax-tau",
                "0.5",
                "--share-all-embeddings",
            ),
        ),
        ({"layer_wise_attention": True}, ("--layer-wise-attention",)),
    ],
    ids=str,
)
def test_yaml_gives_the_model_of_the_flags(
    values: dict[str, Any], flags: tuple[str, ...], sizes: dict[str, Any]
) -> None:
    ours, theirs = yaml_model({**sizes, **values}), build(*flags)[0]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        if "_float_tensor" not in name:
            assert torch.equal(ours.state_dict()[name], value), name
    assert torch.equal(log_probs(ours.eval(), batch()), log_probs(theirs.eval(), batch()))


def test_a_yaml_section_completes_a_named_architecture() -> None:
    model = yaml_model({"_name": f"{ARCH}_tiny", "surfacefusion": "att", "decoder": {"layers": 1}})
    assert len(model.decoder.layers) == 1 and len(model.encoder.layers) == 4
    assert model.decoder.embed_dim == 128 and model.decoder.fc1.out_features == 256
    assert model.decoder.sf_attn.dropout_module.p == 0.1


def test_what_a_yaml_run_stores_builds_the_same_model() -> None:
    cfg = OmegaConf.create({"_name": ARCH, **NESTED, "surfacefusion": "att", "sf_ffn": False})
    task = tasks.setup_task(parse())
    shapes = {n: p.shape for n, p in task.build_model(cfg).named_parameters()}
    stored = OmegaConf.create(OmegaConf.to_container(cfg))
    assert {n: p.shape for n, p in task.build_model(stored).named_parameters()} == shapes
    assert stored == cfg


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"sf_gat": 0.8},
            "model.sf_gat in the YAML config is not an option of this model; did you mean sf_gate?",
        ),
        ({"zzz": 1}, "model.zzz in the YAML config is not an option of this model; take it out"),
        (
            {"encoder": {"layer": 2}},
            "model.encoder_layer in the YAML config is not an option of this model; "
            "did you mean encoder_layers?",
        ),
    ],
    ids=str,
)
def test_a_misspelt_yaml_key_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(SurfaceFusionError) as error:
        yaml_model({"surfacefusion": "att", **values})
    assert str(error.value) == text


def test_published_options_in_yaml_are_refused_too() -> None:
    with pytest.raises(SurfaceFusionError, match="addtional_source_output"):
        yaml_model({**FLAT, "addtional_source_output": "final"})


@pytest.mark.parametrize(
    "values", [{"sf_mode": "softest"}, {"sf_gate": 2}, {"surfacefusion": "dot"}], ids=str
)
def test_bad_values_in_yaml_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(SurfaceFusionError, match=str(next(iter(values.values())))):
        yaml_model({**FLAT, "surfacefusion": "att", **values})


# One model does not influence the next


def test_configs_share_nothing() -> None:
    first, second = SurfaceFusionConfig(), SurfaceFusionConfig()
    first.encoder.layers = 2
    first.decoder.layers = 3
    first.quant_noise.pq = 0.5
    assert (second.encoder.layers, second.decoder.layers, second.quant_noise.pq) == (6, 6, 0.0)
    assert (SurfaceFusionConfig().encoder.layers, SurfaceFusionConfig().decoder.output_dim) == (6, 512)


def test_two_models_one_after_the_other() -> None:
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


def test_struct_flag_of_a_yaml_config_is_left_as_it_was() -> None:
    cfg = OmegaConf.create({"_name": ARCH, **FLAT})
    OmegaConf.set_struct(cfg, True)
    tasks.setup_task(parse()).build_model(cfg)
    assert OmegaConf.is_struct(cfg)
    with open_dict(cfg):
        assert cfg.sf_ffn is True


@pytest.mark.parametrize("tau", ["nan", "inf", "-1"])
def test_tau_is_checked(tau: str) -> None:
    with pytest.raises(SurfaceFusionError, match=f"--sf-softmax-tau {float(tau)} is no factor"):
        build(*ATT, "--sf-mode", "soft", "--sf-softmax-tau", tau)


def test_flags_without_surfacefusion_are_remarked_on(caplog: pytest.LogCaptureFixture) -> None:
    build("--sf-mode", "soft", "--sf-idx", "0")
    assert "--sf-mode, --sf-idx: without effect, since --surfacefusion is not given" in caplog.messages
    caplog.clear()
    build()
    assert [r.message for r in caplog.records if r.name.startswith("surface_fusion")] == []


def test_encoder_fusion_in_yaml() -> None:
    """fairseq takes names that begin with ``encoder_`` for a part of its section *encoder*."""
    cfg = yaml_model(
        {"encoder": {"layers": 3}, "encoder_fusion": "dwatt", "encoder_fusion_embedding": True}
    ).cfg
    assert (cfg.encoder_fusion, cfg.encoder_fusion_embedding, cfg.encoder.layers) == ("dwatt", True, 3)
    flat = yaml_model({"encoder_layers": 3, "transparent_attention": True, "fine_grained_ta": True}).cfg
    assert (flat.encoder_fusion, flat.encoder.layers) == ("fine-grained", 3)
