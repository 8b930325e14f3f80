"""Draw the tables: bars of the contenders for each setting, curves for ``scaling``.

    python scripts/bench/plot.py [CSV ...] -o bench.png         by default all CSVs of results/

Of each table only the last run in its CSV is drawn, so that what stands side by side was measured together;
the title names the hardware of all that is drawn.
"""

import argparse
from collections.abc import Sequence
from pathlib import Path

import matplotlib
from results import CONTENDERS, RESULTS, Row, read_rows, together

matplotlib.use("Agg")
import matplotlib.pyplot as plt
from matplotlib.axes import Axes

from surface_fusion.io.atomic_write import atomic_write

NAMES = (*CONTENDERS, "floor")
COLOURS = {name: f"C{i}" for i, name in enumerate(NAMES)}
AXES = {"max_tokens": "tokens a batch", "vocab": "vocabulary", "layers": "layers of encoder and decoder"}

MANY = 12
"""Groups of bars whose names do not fit side by side."""

Settings = dict[str, str]


def settings_of(row: Row) -> Settings:
    """The cell ``setting``, taken apart."""
    return dict(part.split("=", 1) for part in row.setting.split(";"))


def last_runs(rows: Sequence[Row]) -> dict[tuple[str, str], list[Row]]:
    """(table, unit) -> the rows of the table's last run."""
    last = {row.table: row.run for row in rows}
    found: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        if row.run == last[row.table]:
            found.setdefault((row.table, row.unit), []).append(row)
    return found


def varying(settings: Sequence[Settings]) -> list[str]:
    """Keys whose value is not the same everywhere; ``updates`` belongs to the phase."""
    keys = dict.fromkeys(key for setting in settings for key in setting)
    return [k for k in keys if k != "updates" and len({setting.get(k) for setting in settings}) > 1]


def draw_bars(axes: Axes, rows: Sequence[Row]) -> None:
    """A group of bars for each setting, a bar for each contender."""
    keys = varying([settings_of(row) for row in rows])

    def label(row: Row) -> str:
        setting = settings_of(row)
        return "\n".join(f"{key} {setting[key]}" for key in keys if key in setting)

    groups = list(dict.fromkeys(map(label, rows)))
    names = [name for name in NAMES if any(row.contender == name for row in rows)]
    width = 0.8 / len(names)
    for i, name in enumerate(names):
        values = {label(row): row.value for row in rows if row.contender == name}
        places = [x + (i - (len(names) - 1) / 2) * width for x, group in enumerate(groups) if group in values]
        axes.bar(
            places, list(values[g] for g in groups if g in values), width, color=COLOURS[name], label=name
        )
    axes.set_xticks(range(len(groups)), groups, fontsize=7, rotation=90 if len(groups) > MANY else 0)


def draw_scaling(axes: Sequence[Axes], rows: Sequence[Row]) -> None:
    """Along each of the three axes, the points that differ from the most frequent one in it alone."""
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
    """Write the picture to *out* (PNG or SVG by its name).

    Raises:
        SystemExit: there are no rows.
    """
    tables = last_runs(rows)
    if not tables:
        raise SystemExit("no measurements to draw; run train.py, loss.py, decode.py, memory.py or scaling.py")
    columns = len(AXES)
    figure = plt.figure(figsize=(13, 3.2 * len(tables)), layout="constrained")
    grid = figure.add_gridspec(len(tables), columns)
    for i, ((table, unit), found) in enumerate(sorted(tables.items())):
        title = f"{table}, {together(r.hardware for r in found)}, torch {together(r.torch for r in found)}"
        if table == "scaling":
            panels = [figure.add_subplot(grid[i, j]) for j in range(columns)]
            draw_scaling(panels, found)
        else:
            panels = [figure.add_subplot(grid[i, :])]
            draw_bars(panels[0], found)
        panels[0].set_title(title, loc="left", fontsize=9)
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
    # The table of methods is no comparison of these contenders, and is in the README.
    draw([row for row in rows if row.contender in NAMES and row.table != "methods"], args.out)


if __name__ == "__main__":
    main()
