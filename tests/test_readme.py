"""What the README says of flags and files is so."""

import re
from dataclasses import fields
from pathlib import Path

import pytest
from fairseq.models.transformer import TransformerConfig

from surface_fusion.config import SurfaceFusionConfig

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")
INHERITED = {f.name for f in fields(TransformerConfig)}
OURS = [f for f in fields(SurfaceFusionConfig) if f.name not in INHERITED]


@pytest.mark.parametrize("field", OURS, ids=lambda field: field.name)
def test_every_flag_is_in_the_table(field) -> None:
    flag = "--" + field.name.replace("_", "-")
    row = next((line for line in README.splitlines() if re.match(rf"\| `[^|]*{flag}[ `]", line)), None)
    assert row, f"{flag} is missing in the README's table of flags"
    if isinstance(field.default, (int, float, str)) and not isinstance(field.default, bool):
        default = f"{field.default:g}" if field.name == "sf_gate" else str(field.default)
        assert row.replace("\\|", "").split("|")[2].strip() == f"`{default}`"


@pytest.mark.parametrize("path", sorted(set(re.findall(r"\]\(([a-zA-Z][\w./-]+)\)", README)) - {"https"}))
def test_every_link_leads_somewhere(path: str) -> None:
    assert (ROOT / path).exists()


@pytest.mark.parametrize("script", sorted(set(re.findall(r"scripts/[\w/]+\.sh", README))))
def test_every_script_can_be_run(script: str) -> None:
    assert (ROOT / script).stat().st_mode & 0o100
