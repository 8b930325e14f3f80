"""scripts/bench/paper_figures.py: what it says of the paper's claim, and its pictures from its CSVs."""

import math
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from surface_fusion.analysis.ablation import percent_change
from tests.scripts.bench.conftest import BENCH, script

FIGURES = BENCH.parent / "figures"


def test_the_claim_holds_of_the_papers_own_values() -> None:
    figures = script("paper_figures")
    said = figures.claim(figures.FIGURE_1, [[0.0] * 6] * 7)
    assert "gives the embedding layer 0.130 ± 0.000 of its weight (paper: 0.13) and most to layer 5" in said
    assert "in decoder layers 5, 6 of 6 (paper: 5, 6 of 6)" in said
    assert said.endswith("lower ones do, holds here")


@pytest.mark.parametrize(
    ("weights", "said"),
    [
        ([[0.4, 0.5], [0.3, 0.2], [0.3, 0.3]], "in decoder layers 1, 2 of 2"),
        ([[0.3, 0.3], [0.4, 0.2], [0.3, 0.5]], "in decoder layers none of 2"),
        ([[0.5, 0.3], [0.3, 0.4], [0.2, 0.3]], "in decoder layers 1 of 2"),
        ([[0.45, 0.4], [0.5, 0.3], [0.05, 0.3]], "in decoder layers 2 of 2"),
    ],
)
def test_the_claim_does_not_hold_of_other_values(weights: list[list[float]], said: str) -> None:
    found = script("paper_figures").claim(weights, [[0.0, 0.0]] * 3)
    assert said in found and found.endswith("does not hold here")


@pytest.mark.slow
def test_the_committed_tables_can_be_drawn_again(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for n in (1, 2):
        shutil.copy(FIGURES / f"figure{n}.csv", tmp_path)
    run("paper_figures", "--redraw", "-o", tmp_path)
    said = capsys.readouterr().out
    assert "0.165 ± 0.002" in said and "0.202 ± 0.001" in said and "does not hold here" in said
    assert "without layer 6: -4.68 ± 2.05 %" in said
    drawn = [(tmp_path / f"figure{n}.svg").read_text(encoding="utf-8") for n in (1, 2)]
    assert "<!-- weight -->" in drawn[0], "the colour bar's"
    assert "<!-- ours, 3 seed(s) -->" in drawn[0] and "<!-- ours, 3 seed(s) -->" in drawn[1]
    assert "<!-- paper (Ro-En, read off its figure) -->" in drawn[1]


def test_a_damaged_table_is_reported_in_one_line(run: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"figure1\.csv does not exist; leave out --redraw"):
        run("paper_figures", "--redraw", "-o", tmp_path)
    (tmp_path / "figure1.csv").write_text("encoder_layer,decoder_layer,mean,deviation,paper\nEmb,1,1,0,\n")
    with pytest.raises(SystemExit, match=r"figure1\.csv has no column seeds; leave out --redraw"):
        run("paper_figures", "--redraw", "-o", tmp_path)
    whole = (FIGURES / "figure1.csv").read_text(encoding="utf-8")
    for damaged in (whole.replace("0.1", "abc", 1), "".join(whole.splitlines(True)[:9])):
        (tmp_path / "figure1.csv").write_text(damaged, encoding="utf-8")
        with pytest.raises(SystemExit, match=r"a CSV in .* is damaged \(.*\); leave out --redraw"):
            run("paper_figures", "--redraw", "-o", tmp_path)


@pytest.mark.parametrize("flags", [(), ("data",), ("data", "one.pt", "--redraw"), ("data", "--redraw")])
def test_either_models_or_redraw_must_be_given(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str], flags: tuple[str, ...]
) -> None:
    with pytest.raises(SystemExit):
        run("paper_figures", *flags, "-o", tmp_path)
    assert "give DATA-BIN and CHECKPOINTs, or --redraw alone" in capsys.readouterr().err


def test_a_change_is_relative_to_the_whole_model() -> None:
    assert percent_change(19.0, 20.0) == pytest.approx(-5)
    assert math.isnan(percent_change(1.0, 0.0))
    assert all(map(math.isnan, script("paper_figures")._moments((math.nan, math.nan))))
    assert script("paper_figures")._moments((1.0, 3.0)) == (2.0, pytest.approx(2**0.5))
