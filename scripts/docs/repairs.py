"""Write ``docs/repairs.md`` from the functions in ``surface_fusion/compat`` marked by ``@repair``."""

import inspect
from itertools import groupby
from pathlib import Path

from surface_fusion.compat.repairs import REPAIRS

PAGE = Path(__file__).parents[2] / "docs" / "repairs.md"

HEAD = """# Repairs of fairseq

fairseq is no longer released. When this package is imported, it wraps the functions of fairseq in the first
column, for all models and commands (the check of `--model-overrides` for models of this package only). The
faults were seen in ve-fairseq 0.12.3, fairseq-fixed 0.12.3.1; "fs 5610" is issue 5610 of
facebookresearch/fairseq. A test runs plain fairseq and fails when a fault is gone; the repair can then be
removed.

The import also registers the classes in fairseq's checkpoints with torch's safe unpickler (fs 5610), and
ignores warnings that users cannot act on. `scripts/docs/repairs.py` writes this page from the docstrings in
[`surface_fusion/compat`](../surface_fusion/compat/repairs.py).

| attribute | what the repair does | report |
|---|---|---|
"""


def page() -> str:
    """The text of ``docs/repairs.md``; attributes with one wrapper share a row."""
    rows = []
    for (wrapper, report), group in groupby(REPAIRS, lambda repair: (repair.wrapper, repair.report)):
        names = "<br>".join(f"`{repair.name}`" for repair in group)
        summary = (inspect.getdoc(wrapper) or "").split("\n\n")[0].replace("``", "`").replace("\n", " ")
        rows.append(f"| {names} | {summary} | {report} |\n")
    return HEAD + "".join(rows)


if __name__ == "__main__":
    PAGE.write_text(page(), encoding="utf-8")
