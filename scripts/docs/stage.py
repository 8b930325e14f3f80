"""Collect the pages of the documentation site in a folder that mkdocs reads.

    python scripts/docs/stage.py FOLDER

The pages are those of docs/, with the README as the first one. Files that they link to are copied to
FOLDER/files, and the links adapted; a link to a folder becomes plain text. ``<!-- ::: NAME -->`` in a page,
which GitHub does not show, becomes ``::: NAME``, where mkdocstrings inserts the docstring of NAME.
"""

import re
import shutil
import sys
from os.path import relpath
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
LINK = re.compile(r"(!?)\[(?P<text>[^\[\]]*)\]\((?P<path>[^)#:\s]+)(?P<anchor>#[^)\s]*)?\)")


def stage(folder: Path) -> None:
    """Write the pages and what they need to *folder*, which is emptied first."""
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    for page in (ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))):
        _write(page, folder)


def _site_path(path: Path) -> str:
    """Where a file of the repository is in the staged folder."""
    if path == ROOT / "README.md":
        return "index.md"
    return path.name if path.parent == ROOT / "docs" else f"files/{path.relative_to(ROOT).as_posix()}"


def _write(path: Path, folder: Path) -> None:
    target = folder / _site_path(path)
    if target.exists():
        return
    target.parent.mkdir(parents=True, exist_ok=True)
    if path.suffix != ".md":
        shutil.copyfile(path, target)
        return
    target.touch()  # pages may link to each other

    def adapt(link: re.Match[str]) -> str:
        linked = (path.parent / link["path"]).resolve()
        if not linked.is_file():
            return f"`{link['text']}`" if "`" not in link["text"] else link["text"]
        _write(linked, folder)
        relative = relpath(folder / _site_path(linked), target.parent)
        return f"{link[1]}[{link['text']}]({relative}{link['anchor'] or ''})"

    text = LINK.sub(adapt, path.read_text(encoding="utf-8"))
    text = re.sub(r"<!-- (:::.*?)-->", r"\1", text, flags=re.DOTALL)
    # GitHub needs the backslash in a table's code, mkdocs would show it.
    text = re.sub(r"`[^`\n]+`", lambda code: code[0].replace("\\|", "|"), text)
    target.write_text(text, encoding="utf-8")


if __name__ == "__main__":
    if len(sys.argv) != 2:
        raise SystemExit("usage: stage.py FOLDER")
    stage(Path(sys.argv[1]).resolve())
