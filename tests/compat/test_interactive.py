"""``interactive``: as many answers as lines, each with the number of its line."""

import re
import sys
from pathlib import Path

import pytest

from surface_fusion.cli.main import main
from tests.helpers import warm_processes
from tests.helpers.paths import REFERENCE

LINES = ["the\x1c bird \r horse", "the house\u2028", "", "horse " * 1500, "horse " * 700, "a horse"]


@pytest.mark.slow
def test_each_line_gets_a_hypothesis(user_dir: Path) -> None:
    """With lines that hold what is no line end, an empty one, and two that are too long."""
    flags = (REFERENCE / "data-bin", "--cpu", "--user-dir", user_dir)
    flags += ("--path", REFERENCE / "checkpoint_best.pt", "--beam", 2)
    flags += ("--buffer-size", 4, "--max-tokens", 600, "--nbest", 2)
    text = "\ufeff" + "".join(line + "\n" for line in LINES)
    done = warm_processes.run("fairseq_cli.interactive:cli_main", *flags, text=text)
    assert done.returncode == 0, done.stderr
    printed, said = done.stdout, done.stderr + done.stdout
    found = re.findall(r"^H-(\d+)\t(\S+)\t(.*)$", printed, re.MULTILINE)
    assert [int(place) for place, *_ in found] == [0, 0, 1, 1, 2, 3, 4, 5, 5]
    assert [place for place, score, text in found if (score, text) == ("-inf", "")] == ["2", "3", "4"]
    sources = dict(re.findall(r"^S-(\d+)\t(.*)$", printed, re.MULTILINE))
    assert (sources["0"], sources["5"]) == ("the bird horse", "a horse")
    assert len(re.findall(r"^[DP]-", printed, re.MULTILINE)) == 2 * len(found)
    assert "line 4 has 1501 subwords, the model takes 1024; its translation is left empty" in said
    assert "line 5 has 701 subwords, --max-tokens allows 600; its translation is left empty" in said


def test_a_closed_input_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(sys, "stdin", None)
    flags = ("--path", REFERENCE / "checkpoint_best.pt", "--cpu", "--beam", "1")
    assert main(["interactive", str(REFERENCE / "data-bin"), *map(str, flags)]) == 2
    assert "standard input is closed; redirect the text to it, or add --input FILE" in capsys.readouterr().err
