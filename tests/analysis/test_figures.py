"""Labels of figures are text, whatever they are."""

import re
import warnings
from pathlib import Path
from xml.etree import ElementTree

import pytest

pytest.importorskip("matplotlib")

from surface_fusion.analysis.figures import MAX_INCHES, heat_map, save_figure

NAMES = (
    "$x$",
    "$\\frac{$",
    "a_b^c",
    "\\$",
    "<b>&amp;</b>",
    "$",
    "\u2581\u725b",
    "\x07\x1b",
    "\u0628",
    "--",
    "\ud800",
)


def drawn(path: Path, rows: tuple[str, ...], columns: tuple[str, ...]) -> str:
    """The SVG of a heat map; a warning is an error."""
    values = [[0.5] * len(columns)] * len(rows)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        figure = heat_map(values, rows=rows, columns=columns, row_label="r", column_label="c", numbers=False)
        svg = save_figure(figure, path / "map")[1].read_text(encoding="utf-8")
    ElementTree.fromstring(svg)
    return svg


def test_names_are_drawn_as_they_are(tmp_path: Path) -> None:
    svg = drawn(tmp_path, NAMES, NAMES)
    comments = re.findall("<!-- (.*?) -->", svg)
    for text in ("$x$", "$\\frac{$", "a_b^c", "\\$", "\\x07\\x1b", "\\ud800"):
        assert comments.count(text) == 2


@pytest.mark.slow
def test_the_size_of_a_figure_is_limited(tmp_path: Path) -> None:
    """1,000 of a side would be a picture of 4 GB; every third has a name."""
    figure = heat_map(
        [[0.0] * 1000] * 1000,
        rows=[f"r{i}" for i in range(1000)],
        columns=[f"c{i}" for i in range(1000)],
        row_label="",
        column_label="",
        numbers=False,
    )
    assert tuple(figure.get_size_inches()) == (MAX_INCHES, MAX_INCHES)
    assert [text.get_text() for text in figure.axes[0].get_xticklabels()][:3] == ["c0", "c3", "c6"]
