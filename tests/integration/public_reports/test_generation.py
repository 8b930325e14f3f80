"""Public reports about generate, interactive and validate."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import RunFairseq
from tests.integration.public_reports.conftest import CHECKPOINT

LONG = " ".join(["horse"] * 3000)


def with_long_line(data: Path, split: str) -> Path:
    """The data folder with *split* made of two short pairs and one of 3,000 tokens between them."""
    out = data.with_name("long")
    text = {"en": ["a horse sees a house", LONG, "the bird"], "xx": ["un bur", LONG, "lum"]}
    for lang, lines in text.items():
        (data.parent / f"text.{lang}").write_text("\n".join(lines) + "\n")
    command = [sys.executable, "-m", "surface_fusion", "preprocess", "-s", "en", "-t", "xx"]
    command += ["--srcdict", str(data / "dict.en.txt"), "--tgtdict", str(data / "dict.xx.txt")]
    command += [f"--{split}pref", str(data.parent / "text"), "--destdir", str(out)]
    subprocess.run(command, check=True, capture_output=True)
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


def test_interactive_answers_an_overlong_line_with_an_empty_one(data: Path, user_dir: Path) -> None:
    command = [sys.executable, "-m", "fairseq_cli.interactive", str(data), "--user-dir", str(user_dir)]
    command += ["--path", str(CHECKPOINT), "--buffer-size", "3", "-s", "en", "-t", "xx"]
    text = f"a horse sees a house\n{LONG}\nthe bird\n"
    done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
    assert re.findall(r"^H-(\d+)", done.stdout, re.M) == ["0", "1", "2"]
    assert re.search(r"^D-1\t\S+\t$", done.stdout, re.M)
    assert re.search(r"line 2 has \d+ subwords", done.stdout + done.stderr)


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
def test_ways_to_generate(run_fairseq: RunFairseq, data: Path, flags: tuple[object, ...]) -> None:
    """fs 3312, 4137 (KeyError: 'attn'), and an IndexError of diverse beam search."""
    out = run_fairseq("generate", data, "--path", CHECKPOINT, "--beam", 4, "--remove-bpe", *flags).stdout
    assert len(set(re.findall(r"^H-(\d+)", out, re.M))) == 150
    bleu = float(re.search(r"BLEU4 = ([\d.]+)", out)[1])
    assert bleu > (5 if "--sampling" in flags else 50)
    if "--print-alignment" in flags:
        assert len(re.findall(r"^A-\d+\t\d+-\d+", out, re.M)) == 150


def test_replace_unk(run_fairseq: RunFairseq, data: Path) -> None:
    """Raw text, as fairseq demands for it; a reference word that the dictionary lacks stays readable."""
    for lang, line in (("en", "a horse sees a zebra"), ("xx", "un bur zebru")):
        (data / f"test.en-xx.{lang}").write_text(line + "\n")
    flags = ("--dataset-impl", "raw", "--replace-unk", "--print-alignment", "--path", CHECKPOINT)
    out = run_fairseq("generate", data, *flags).stdout
    hypothesis = re.search(r"^H-0\t\S+\t(.*)", out, re.M)[1]
    assert re.search(r"^S-0\ta horse sees a zebra$", out, re.M)
    assert hypothesis and "<unk>" not in hypothesis
