"""Invalid values are refused and values without effect are logged, each in one line.

Tests ``config/model_checks.py``, ``config/flags.py`` and ``config/encoder_fusion_flags.py``.
"""

from typing import Any

import pytest

from surface_fusion.config.flags import SurfaceFusionConfig
from surface_fusion.errors import SurfaceFusionError
from tests.helpers.tiny import SIZES, build, parse

ATT = ("--surfacefusion", "att")


def config(*flags: str) -> SurfaceFusionConfig:
    return SurfaceFusionConfig.from_namespace(parse(*SIZES, *flags))


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
        (("--decoder-layers", "0"), "--surfacefusion att with --decoder-layers 0"),
        (("--sf-mode", "soft", "--sf-renormalize"), "--sf-renormalize needs --sf-mode hard; soft is"),
        (
            ("--decoder-output-dim", "8", "--share-decoder-input-output-embed"),
            "--decoder-output-dim 8: an output layer that shares the decoder's embedding has its width, 16",
        ),
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
def test_invalid_values_are_named(flags: tuple[str, ...], text: str) -> None:
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
        ({"target_word_dropout": 1.0}, "--target-word-dropout 1.0 is not a probability below 1"),
        ({"addtional_source_output": "final"}, "--addtional-source-output final"),
    ],
    ids=str,
)
def test_invalid_values_in_a_namespace_are_named(changes: dict[str, Any], text: str) -> None:
    args = parse(*SIZES, *ATT)
    vars(args).update(changes)
    with pytest.raises(SurfaceFusionError) as error:
        SurfaceFusionConfig.from_namespace(args)
    assert text in str(error.value)


def test_a_plain_transformer_ignores_fusion_flags() -> None:
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


@pytest.mark.parametrize("tau", ["nan", "inf", "-1"])
def test_tau_is_checked(tau: str) -> None:
    with pytest.raises(SurfaceFusionError, match=f"--sf-softmax-tau {float(tau)} is not a valid factor"):
        build(*ATT, "--sf-mode", "soft", "--sf-softmax-tau", tau)


def test_flags_without_effect_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    build("--sf-mode", "soft", "--sf-idx", "0")
    assert "--sf-mode, --sf-idx: no effect without --surfacefusion" in caplog.messages
    caplog.clear()
    build()
    assert [r.message for r in caplog.records if r.name.startswith("surface_fusion")] == []


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("--encoder-fusion-embedding",), "since --encoder-fusion is not given"),
        (("--no-encoder-fusion-embedding", "--encoder-fusion", "concat"), "with --encoder-fusion concat"),
        (("--encoder-fusion-embedding", "--encoder-fusion", "dense"), "with --encoder-fusion dense"),
        (
            ("--encoder-fusion-embedding", "--encoder-fusion", "extra-layers"),
            "with --encoder-fusion extra-layers",
        ),
        (
            ("--encoder-fusion-embedding", "--no-encoder-fusion-embedding", "--encoder-fusion", "dlcl"),
            "with --encoder-fusion dlcl",
        ),
        (("--encoder-fusion-embedding", "--encoder-fusion", "concat"), None),
        (("--no-encoder-fusion-embedding", "--encoder-fusion", "dlcl"), None),
    ],
    ids=lambda x: " ".join(x) if isinstance(x, tuple) else "",
)
def test_embedding_flags_without_effect_are_logged(
    flags: tuple[str, ...], text: str | None, caplog: pytest.LogCaptureFixture
) -> None:
    build(*flags)
    said = [r.getMessage() for r in caplog.records if r.name == "surface_fusion.config.model_checks"]
    assert said == ([] if text is None else [f"{flags[0]}: without effect {text}"])
