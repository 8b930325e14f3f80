"""Public reports about generate, interactive and validate."""

import io
import re
import sys
from pathlib import Path

import pytest

from surface_fusion.cli.main import main
from tests.conftest import RunFairseq
from tests.integration.public_reports.conftest import CHECKPOINT

pytestmark = pytest.mark.slow

LONG = " ".join(["horse"] * 3000)


def with_long_line(data: Path, split: str) -> Path:
    """The data folder with *split* made of two short pairs and one of 3,000 tokens between them."""
    out = data.with_name("long")
    text = {"en": ["a horse sees a house", LONG, "the bird"], "xx": ["un bur", LONG, "lum"]}
    for lang, lines in text.items():
        (data.parent / f"text.{lang}").write_text("\n".join(lines) + "\n")
    argv = ["preprocess", "-s", "en", "-t", "xx", f"--{split}pref", data.parent / "text", "--destdir", out]
    argv += ["--srcdict", data / "dict.en.txt", "--tgtdict", data / "dict.xx.txt"]
    assert main([*map(str, argv)]) == 0
    return out


def test_generation_skips_and_counts_an_overlong_line(run_fairseq: RunFairseq, data: Path) -> None:
    """fs 1853, 2998: generation stopped at it."""
    out = run_fairseq("generate", with_long_line(data, "test"), "--path", CHECKPOINT).stdout
    assert sorted(re.findall(r"^H-(\d+)", out, re.M)) == ["0", "2"]
    assert "1 samples have invalid sizes and will be skipped" in out


def test_validation_skips_and_counts_an_overlong_line(run_fairseq: RunFairseq, data: Path) -> None:
    """fs 2650: validation stopped at it."""
    long = with_long_line(data, "valid")
    out = run_fairseq(
        "validate", long, "--task", "translation", "--path", CHECKPOINT, "--max-tokens", 4000
    ).stdout
    assert "1 samples have invalid sizes and will be skipped" in out
    assert re.search(r"valid on 'valid' subset.*nll_loss", out)


def test_interactive_answers_an_overlong_line_with_an_empty_one(run_fairseq: RunFairseq, data: Path) -> None:
    flags = ("--path", CHECKPOINT, "--buffer-size", 3, "-s", "en", "-t", "xx")
    text = f"a horse sees a house\n{LONG}\nthe bird\n"
    out = run_fairseq("interactive", data, *flags, text=text).stdout
    assert re.findall(r"^H-(\d+)", out, re.M) == ["0", "1", "2"]
    assert re.search(r"^D-1\t\S+\t$", out, re.M)
    assert re.search(r"line 2 has \d+ subwords", out)


@pytest.mark.parametrize(
    "flags",
    [
        ("--diverse-beam-groups", 2, "--diverse-beam-strength", 0.5),
        ("--sampling", "--sampling-topk", 5, "--nbest", 4),
        ("--print-alignment",),
        ("--prefix-size", 1),
        ("--temperature", 2),
    ],
    ids=lambda flags: flags[0],
)
def test_options_of_generate(run_fairseq: RunFairseq, data: Path, flags: tuple[object, ...]) -> None:
    """fs 3312, 4137 (KeyError: 'attn'), and an IndexError of diverse beam search."""
    out = run_fairseq("generate", data, "--path", CHECKPOINT, "--beam", 4, "--remove-bpe", *flags).stdout
    assert len(set(re.findall(r"^H-(\d+)", out, re.M))) == 150
    bleu = float(re.search(r"BLEU4 = ([\d.]+)", out)[1])
    assert bleu > (5 if "--sampling" in flags else 50)
    if "--print-alignment" in flags:
        assert len(re.findall(r"^A-\d+\t\d+-\d+", out, re.M)) == 150


UNK = ("--replace-unk", "--unkpen", -7, "--max-len-b", 6, "--beam", 2)


@pytest.mark.parametrize("flags", [(), ("--print-alignment",), ("--print-alignment", "soft")], ids=str)
def test_generate_replaces_unknown_words(run_fairseq: RunFairseq, data: Path, flags: tuple[str, ...]) -> None:
    """IndexError without --print-alignment, TypeError with it; --unkpen makes the model predict <unk>."""
    for lang, line in (("en", "zebra"), ("xx", "zebru")):
        (data / f"test.en-xx.{lang}").write_text(line + "\n")
    out = run_fairseq("generate", data, "--dataset-impl", "raw", *UNK, "--path", CHECKPOINT, *flags).stdout
    assert re.search(r"^S-0\tzebra$", out, re.M)
    assert re.search(r"^H-0\t\S+\t(zebra ?)+$", out, re.M)


@pytest.mark.parametrize("plain", [False, True])
def test_interactive_replaces_unknown_words(
    data: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], plain: bool
) -> None:
    """By words as typed, which the dictionary lacks."""
    (data.parent / "words").write_text("zebra zebru\n")
    for replacement, word in (((), "zebra"), ((data.parent / "words",), "zebru")):
        monkeypatch.setattr(sys, "stdin", io.StringIO("zebra\n\nokapi okapi\n"))
        flags = (*UNK[1:], UNK[0], *replacement, "--path", CHECKPOINT, "--cpu", "--buffer-size", 3)
        assert (
            main([*map(str, ("interactive", data, *flags, "--model-overrides", f"{{'sf_plain': {plain}}}"))])
            == 0
        )
        found = re.findall(r"^H-\d\t\S+\t(.*)$", capsys.readouterr().out, re.M)
        assert [set(line.split()) for line in found] == [{word}, set(), {"okapi"}]


def test_plain_commands_check_the_settings_of_the_search(run_fairseq: RunFairseq, data: Path) -> None:
    done = run_fairseq("generate", data, "--path", CHECKPOINT, "--beam", 2, "--nbest", 3, check=False)
    assert done.returncode and "--nbest 3 is more than --beam 2; raise --beam" in done.stdout
