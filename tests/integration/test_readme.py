"""What the README and docs say of flags and files is so."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from fairseq.models.transformer import TransformerConfig

from surface_fusion.config.flags import SurfaceFusionConfig
from tests.helpers.paths import ROOT

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
TEXT = {path: path.read_text(encoding="utf-8") for path in PAGES}
FLAGS = TEXT[ROOT / "docs" / "flags.md"]
LINKS = [
    (page, link)
    for page, text in TEXT.items()
    for link in sorted(set(re.findall(r"\]\(([a-zA-Z.][\w./-]+)\)", text)) - {"https"})
]
INHERITED = {f.name for f in fields(TransformerConfig)}
OURS = [f for f in fields(SurfaceFusionConfig) if f.name not in INHERITED]
SCRIPTS = sorted(set(re.findall(r"scripts/[\w/]+\.(?:sh|py)", "".join(TEXT.values()))))


@pytest.mark.parametrize("field", OURS, ids=lambda field: field.name)
def test_every_flag_is_in_the_table(field) -> None:
    flag = "--" + field.name.replace("_", "-")
    row = next((line for line in FLAGS.splitlines() if re.match(rf"\| `[^|]*{flag}[ `]", line)), None)
    assert row, f"{flag} is missing in the table of docs/flags.md"
    if isinstance(field.default, (int, float, str)) and not isinstance(field.default, bool):
        default = f"{field.default:g}" if field.name == "sf_gate" else str(field.default)
        assert row.replace("\\|", "").split("|")[2].strip() == f"`{default}`"


@pytest.mark.parametrize("page, link", LINKS, ids=lambda value: getattr(value, "name", value))
def test_every_linked_file_exists(page: Path, link: str) -> None:
    assert (page.parent / link).exists()


@pytest.mark.parametrize(
    "script", sorted(set(re.findall(r"scripts/[\w/]+\.(?:sh|py)", "".join(TEXT.values()))))
)
def test_every_script_exists(script: str) -> None:
    assert (ROOT / script).is_file()
    assert script.endswith(".py") or (ROOT / script).stat().st_mode & 0o100


@pytest.mark.parametrize("page", [*PAGES, ROOT / "CHANGELOG.md"], ids=lambda page: page.name)
def test_the_text_has_no_placeholder(page: Path) -> None:
    assert not re.search(r"@[A-Z]+@", page.read_text(encoding="utf-8"))


def test_the_readme_is_one_page() -> None:
    readme = TEXT[ROOT / "README.md"]
    assert len(readme.splitlines()) <= 200
    assert len(readme.split()) <= 2000
