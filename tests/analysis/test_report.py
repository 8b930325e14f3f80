"""The report in a real headless browser: no network, its pictures show, its tables sort, it fits a phone."""

import html
import json
import re
import shutil
import subprocess
from pathlib import Path

import pytest

from surface_fusion.analysis.figures import heat_map, save_figure, save_table
from surface_fusion.analysis.report import ROWS, write_report

pytestmark = pytest.mark.slow

CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
in_a_browser = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")

PROBE = """
<script>
addEventListener("load", () => {
  const rows = () => [...document.querySelectorAll("#ablation tbody tr")];
  const column = (n) => rows().map((tr) => tr.cells[n].textContent);
  const press = (n) => document.querySelectorAll("#ablation th button")[n].click();
  const found = { before: column(1) };
  press(1); found.up = column(1);
  press(1); found.down = column(1);
  press(0); found.words = column(0);
  found.pictures = [...document.images].map((image) => image.naturalWidth);
  const fetched = performance.getEntriesByType("resource").map((e) => e.name);
  found.fetched = fetched.filter((name) => !name.startsWith("data:"));
  document.body.setAttribute("data-found", JSON.stringify(found));
});
</script>
"""


@pytest.fixture
def report(tmp_path: Path) -> Path:
    rows = [("none", "20.5", "a"), ("Emb", "9.25", "<b>ș</b>"), ("1", "100", "ț"), ("2", "-3", "z")]
    save_table(tmp_path / "ablation.csv", ("silenced", "bleu", "note"), rows)
    numbers = [[0.1, 0.2], [0.3, 0.4]]
    names = {"rows": ["Emb", "1"], "columns": ["1", "2"], "row_label": "layer", "column_label": "decoder"}
    save_figure(heat_map(numbers, **names), tmp_path / "layers")  # type: ignore[arg-type]
    save_table(tmp_path / "pca.csv", ("side", "word"), [("source", f"w{i}") for i in range(ROWS + 7)])
    return write_report(tmp_path, "checkpoint <1>.pt")


def dom(page: Path, *flags: str) -> str:
    """The document after its scripts have run, with no network."""
    offline = ("--host-resolver-rules=MAP * ~NOTFOUND", "--disable-background-networking")
    command = [str(CHROMIUM), "--headless=new", "--no-sandbox", "--disable-gpu", *offline, *flags]
    command += [f"--user-data-dir={page.parent / 'profile'}", "--virtual-time-budget=4000", "--dump-dom"]
    done = subprocess.run([*command, page.as_uri()], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout


def test_the_report_contains_the_files_of_the_folder(report: Path) -> None:
    text = report.read_text(encoding="utf-8")
    assert re.findall('<section id="(.*?)">', text) == ["layers", "ablation", "pca"]
    assert "checkpoint &lt;1&gt;.pt" in text and "&lt;b&gt;ș&lt;/b&gt;" in text
    assert f"The first {ROWS} of {ROWS + 7} lines of pca.csv" in text
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", text)


@in_a_browser
def test_pictures_and_sorting(report: Path) -> None:
    text = report.read_text(encoding="utf-8").replace("</body>", f"{PROBE}</body>")
    probed = report.with_name("probed.html")
    probed.write_text(text, encoding="utf-8")
    (found,) = re.findall('data-found="(.*?)"', dom(probed))
    found = json.loads(html.unescape(found))
    assert found["before"] == ["20.5", "9.25", "100", "-3"]
    assert found["up"] == ["-3", "9.25", "20.5", "100"]
    assert found["down"] == ["100", "20.5", "9.25", "-3"]
    assert found["words"] == ["1", "2", "Emb", "none"]
    assert found["pictures"] and all(width > 0 for width in found["pictures"])
    assert found["fetched"] == []


@in_a_browser
def test_the_report_fits_a_narrow_screen(report: Path) -> None:
    """In a frame of 360 pixels nothing but the tables' own boxes scrolls sideways."""
    page = html.escape(report.read_text(encoding="utf-8"), quote=True)
    frame = report.with_name("frame.html")
    frame.write_text(
        f'<iframe width="360" height="700" style="border:0" srcdoc="{page}"></iframe><script>'
        "addEventListener('load', () => { const page = document.querySelector('iframe').contentDocument;"
        "document.body.setAttribute('data-width', page.documentElement.scrollWidth); });</script>",
        encoding="utf-8",
    )
    (width,) = re.findall('data-width="([0-9]+)"', dom(frame))
    assert 300 < int(width) <= 360
