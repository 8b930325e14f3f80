"""Write heat maps and curves as PNG and SVG, and tables as CSV; files are replaced atomically."""

import csv
import io
import math
import warnings
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.io.atomic_write import atomic_write, write_text

MAX_INCHES = 60  # maximum width and height of a figure
LABEL_INCHES = 0.18  # size of the label of a row or column


def pyplot() -> Any:
    """Import and return matplotlib.pyplot, set up to draw without a display.

    Raises:
        SurfaceFusionError: matplotlib is not installed.
    """
    try:
        import matplotlib
    except ImportError as error:
        raise SurfaceFusionError("drawing needs matplotlib; install it: pip install matplotlib") from error
    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def save_figure(figure: Any, stem: Path) -> list[Path]:
    """Write *figure* to ``stem.png`` and ``stem.svg``, and close it."""
    stem.parent.mkdir(parents=True, exist_ok=True)
    paths = [stem.with_name(f"{stem.name}.{suffix}") for suffix in ("png", "svg")]
    for path, metadata in zip(paths, (None, {"Date": None}), strict=True):
        with warnings.catch_warnings(), atomic_write(path) as file:
            # A character that the font lacks is drawn as a box; the table contains it.
            unknown_character = r"(?s)(Glyph|Matplotlib currently does not support)"
            warnings.filterwarnings("ignore", unknown_character, UserWarning)
            figure.savefig(file, format=path.suffix[1:], dpi=150, metadata=metadata)
    pyplot().close(figure)
    return paths


def save_table(path: Path, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Path:
    """Write a CSV file and return its path; floats have six significant digits, None is empty."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(columns)
    writer.writerows([f"{cell:.6g}" if isinstance(cell, float) else cell for cell in row] for row in rows)
    return save_text(path, text.getvalue())


def save_text(path: Path, text: str) -> Path:
    """Write *text* to *path*, create its folder if needed, and return the path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text)
    return path


def heat_map(
    values: Sequence[Sequence[float]],
    *,
    rows: Sequence[str],
    columns: Sequence[str],
    row_label: str,
    column_label: str,
    title: str = "",
    numbers: bool = True,
) -> Any:
    """Draw *values* as a heat map, the first row at the bottom.

    Args:
        rows, columns: names. If not all fit, only every n-th is drawn. Not parsed as markup.
        row_label, column_label, title: texts of the axes and of the figure.
        numbers: whether to write the values into the cells.
    """
    plt = pyplot()
    width = min(MAX_INCHES, max(3.2, 0.55 * len(columns) + 1.6))
    height = min(MAX_INCHES, max(2.4, 0.42 * len(rows) + 1.2))
    figure, axes = plt.subplots(figsize=(width, height), layout="constrained")
    image = axes.imshow(values, origin="lower", aspect="auto", cmap="Blues")
    rotation = 0 if max(map(len, columns)) < 4 else 60
    axes.set_xticks(*_ticks(columns, width), rotation=rotation, parse_math=False)
    axes.set_yticks(*_ticks(rows, height), parse_math=False)
    axes.set(xlabel=column_label, ylabel=row_label, title=title)
    if numbers:
        middle = (image.norm.vmin + image.norm.vmax) / 2
        for i, row in enumerate(values):
            for j, value in enumerate(row):
                if not math.isnan(value):
                    colour = "white" if value > middle else "black"
                    axes.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    figure.colorbar(image, ax=axes)
    return figure


def _ticks(names: Sequence[str], inches: float) -> tuple[range, list[str]]:
    """Return positions and texts of as many labels as fit; unprintable characters are escaped."""
    positions = range(0, len(names), math.ceil(len(names) * LABEL_INCHES / inches))
    return positions, [
        "".join(
            c if c.isprintable() else c.encode("unicode_escape", "surrogatepass").decode() for c in names[i]
        )
        for i in positions
    ]
