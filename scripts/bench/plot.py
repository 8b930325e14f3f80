"""Draw the tables: bars of the contenders for each setting, curves for ``scaling``.

    python scripts/bench/plot.py [CSV ...] -o bench.png         default: all CSVs of results/

Only the last run in each CSV is drawn, so that the values of a panel were measured together. The title names
the hardware.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from results import CONTENDERS, RESULTS, Row, join_names, read_rows

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from surface_fusion.io.atomic_write import atomic_write

NAMES = (*CONTENDERS, "floor")
COLOURS = {name: f"C{i}" for i, name in enumerate(NAMES)}
AXES = {"max_tokens": "tokens per batch", "vocab": "vocabulary", "layers": "layers of encoder and decoder"}

MAX_HORIZONTAL_LABELS = 12
"""Maximum number of groups of bars with horizontal labels."""

Settings = dict[str, str]


def settings_of(row: Row) -> Settings:
    """Parse the cell ``setting``."""
    return dict(part.split("=", 1) for part in row.setting.split(";"))


def last_runs(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """Return the rows of each table's last run, by table and unit."""
    last = {row.table: row.run for row in rows}
    selected: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.run == last[row.table]:
            selected.setdefault((row.table, row.unit), []).append(row)
    return selected


def varying(settings: Sequence[Settings]) -> list[str]:
    """Return the keys whose values differ, except ``updates``, which depends on the phase."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [k for k in keys if k != "updates" and len({setting.get(k) for setting in settings}) > 1]


def draw_bars(axes: Axes, rows: Sequence[Row]) -> None:
    """Draw a group of bars for each setting, with a bar for each contender."""
    keys = varying([settings_of(row) for row in rows])

    def label(row: Row) -> str:
        setting = settings_of(row)
        return "\n".join(f"{key} {setting[key]}" for key in keys if key in setting)

    groups = list(dict.fromkeys(map(label, rows)))
    names = [name for name in NAMES if any(row.contender == name for row in rows)]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        values = {label(row): row.value for row in rows if row.contender == name}
        offset = (i - (len(names) - 1) / 2) * width
        x, heights = zip(*((n + offset, values[g]) for n, g in enumerate(groups) if g in values), strict=True)
        axes.bar(x, heights, width, color=COLOURS[name], label=name)
    rotation = 90 if len(groups) > MAX_HORIZONTAL_LABELS else 0
    axes.set_xticks(range(len(groups)), groups, fontsize=7, rotation=rotation)


def draw_scaling(axes: Sequence[Axes], rows: Sequence[Row]) -> None:
    """Draw a curve along each axis: the points that differ from the most frequent one in it alone."""
    settings = [settings_of(row) for row in rows]
    base = {key: max(values, key=values.count) for key in AXES for values in [[s[key] for s in settings]]}
    for axis, (key, label) in zip(axes, AXES.items(), strict=True):
        for name in NAMES:
            points = sorted(
                (int(setting[key]), row.value)
                for row, setting in zip(rows, settings, strict=True)
                if row.contender == name and all(setting[k] == base[k] for k in AXES if k != key)
            )
            if points:
                axis.plot(*zip(*points, strict=True), "o-", markersize=4, color=COLOURS[name], label=name)
        if key == "layers":
            axis.set_xticks(sorted({int(setting[key]) for setting in settings}))
        else:
            axis.set_xscale("log", base=2)
        axis.set_xlabel(label)


def draw(rows: Sequence[Row], out: Path) -> None:
    """Write the figure to *out*, a PNG or SVG file by its name.

    Raises:
        SystemExit: there are no rows.
    """
    tables = last_runs(rows)
    if not tables:
        raise SystemExit("no measurements to draw; run train.py, loss.py, decode.py, memory.py or scaling.py")
    columns = len(AXES)
    figure = plt.figure(figsize=(13, 3.2 * len(tables)), layout="constrained")
    grid = figure.add_gridspec(len(tables), columns)
    for i, ((table, unit), selected) in enumerate(sorted(tables.items())):
        hardware, torch_version = (
            join_names(getattr(row, name) for row in selected) for name in ("hardware", "torch")
        )
        if table == "scaling":
            panels = [figure.add_subplot(grid[i, j]) for j in range(columns)]
            draw_scaling(panels, selected)
        else:
            panels = [figure.add_subplot(grid[i, :])]
            draw_bars(panels[0], selected)
        panels[0].set_title(f"{table}, {hardware}, torch {torch_version}", loc="left", fontsize=9)
        panels[0].set_ylabel(unit)
        panels[0].legend(fontsize=8)
        for panel in panels:
            panel.set_ylim(bottom=0)
            panel.set_axisbelow(True)
            panel.grid(axis="y", alpha=0.3)
    with atomic_write(out) as file:
        figure.savefig(file, format=out.suffix[1:], dpi=110)
    plt.close(figure)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("tables", type=Path, nargs="*", metavar="CSV")
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    tables = args.tables or sorted(RESULTS.glob("*.csv"))
    rows = [row for table in tables for row in read_rows(table)]
    # The table ``methods`` does not compare these contenders.
    draw([row for row in rows if row.contender in NAMES and row.table != "methods"], args.out)


if __name__ == "__main__":
    main()
