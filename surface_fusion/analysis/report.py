"""Write one HTML page of all figures and tables in a folder, usable offline, with sortable tables."""

import base64
import csv
import html
from pathlib import Path

from surface_fusion.analysis.figures import save_text

ROWS = 500  # maximum of a table in the page; the CSV has all rows

TITLES = {
    "layers": "Weights of the encoder layers",
    "layers_encoder": "Weights of the layers in the inputs of encoder layers",
    "layers_decoder": "Weights of the layers in the inputs of decoder layers",
    "ablation": "BLEU and length without one encoder layer",
    "singular_values": "Singular values of the embeddings",
    "pca": "The most frequent words on two principal components",
    "neighbours": "Nearest target words",
    "branches_summary": "The two branches, means over all tokens",
    "branches": "Predictions of each branch",
    "align_surface": "Surface attention",
    "align_decoder": "Cross attention of the last decoder layer",
}
"""Sections in the order of the page."""

STYLE = """
body { font: 16px/1.5 system-ui, sans-serif; margin: 0 auto; padding: 1rem; max-width: 60rem; color: #222; }
h1 { font-size: 1.4rem; } h2 { font-size: 1.1rem; margin-top: 2rem; }
img { max-width: 100%; height: auto; }
.table { overflow: auto; max-height: 24rem; border: 1px solid #ddd; }
table { border-collapse: collapse; font-size: 0.9rem; }
th, td { padding: 0.2rem 0.6rem; text-align: left; white-space: nowrap; }
th { position: sticky; top: 0; background: #eef3f8; }
th button { all: unset; cursor: pointer; font-weight: 600; }
th button:focus-visible { outline: 2px solid #2b6cb0; }
th[aria-sort=ascending] button::after { content: " \\2191"; }
th[aria-sort=descending] button::after { content: " \\2193"; }
tbody tr:nth-child(even) { background: #f7f7f7; }
"""

SCRIPT = """
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, row = head.parentElement, column = head.cellIndex;
    const up = head.getAttribute("aria-sort") !== "ascending";
    for (const other of row.cells) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", up ? "ascending" : "descending");
    const body = row.closest("table").tBodies[0];
    const key = (tr) => tr.cells[column].textContent;
    const number = (text) => (text.trim() === "" ? NaN : Number(text));
    const compare = (a, b) => {
      const [x, y] = [number(key(a)), number(key(b))];
      return isNaN(x) || isNaN(y) ? key(a).localeCompare(key(b)) : x - y;
    };
    const sorted = [...body.rows].sort((a, b) => (up ? compare(a, b) : compare(b, a)));
    body.append(...sorted);
  });
}
"""


def write_report(folder: Path, model: str) -> Path:
    """Write ``report.html``, a page of the analyses in *folder* with the title *model*."""
    sections = [text for name in TITLES if (text := _section(folder, name))]
    page = (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(model)}</title>\n<style>{STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{html.escape(model)}</h1>\n" + "\n".join(sections) + f"\n<script>{SCRIPT}</script>\n"
        "</body>\n</html>\n"
    )
    return save_text(folder / "report.html", page)


def _section(folder: Path, name: str) -> str:
    picture, table = folder / f"{name}.svg", folder / f"{name}.csv"
    parts = []
    title = html.escape(TITLES[name])
    if picture.exists():
        code = base64.b64encode(picture.read_bytes()).decode()
        parts.append(f'<p><img alt="{title}" src="data:image/svg+xml;base64,{code}"></p>')
    if table.exists():
        with open(table, encoding="utf-8", newline="") as file:
            head, *rows = csv.reader(file)
        parts.append(_table(head, rows[:ROWS]))
        if len(rows) > ROWS:
            parts.append(f"<p>The first {ROWS} of {len(rows)} lines of {html.escape(table.name)}.</p>")
    return "\n".join([f'<section id="{name}">\n<h2>{title}</h2>', *parts, "</section>"]) if parts else ""


def _table(head: list[str], rows: list[list[str]]) -> str:
    cells = "".join(
        f'<th scope="col"><button type="button">{html.escape(name.replace("_", " "))}</button></th>'
        for name in head
    )
    lines = ["".join(f"<td>{html.escape(cell)}</td>" for cell in row) for row in rows]
    body = "\n".join(f"<tr>{line}</tr>" for line in lines)
    table = f"<table>\n<thead><tr>{cells}</tr></thead>\n<tbody>\n{body}\n</tbody></table>"
    return f'<div class="table">{table}</div>'
