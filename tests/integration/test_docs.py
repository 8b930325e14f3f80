"""README and docs: commands and Python run, links lead somewhere, generated parts are current."""

import contextlib
import importlib.util
import io
import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from surface_fusion.cli.main import main
from surface_fusion.encoder_fusion import methods
from tests.helpers.paths import ENRO, ROOT
from tests.helpers.small_training import OPTIMISER, PLAIN, SIZES

PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
STARTS = re.compile(r'(echo "[^"]*" \| )?(surface-fusion|fairseq-[a-z-]+|scripts/\S+|python|torchrun|pip) ?')

PIPE = re.compile(r'(?:echo "([^"]*)" \| )?(.*?)(?: 2>/dev/null \| (.*))?')

EXTERNAL = (
    "https://arxiv.org/abs/2012.14768",
    "https://github.com/facebookresearch/fairseq",
    "https://github.com/nyu-dl/dl4mt-nonauto",
    "https://pypi.org/project/fairseq-fixed/",
    "https://pypi.org/project/ve-fairseq/",
)
"""Links to other sites, which no test fetches: open them when you change this list."""

SHORT = (*SIZES, "--cpu", "--max-tokens", 2000, "--num-workers", 0, "--max-epoch", 5)
ONE_UPDATE = (*SHORT, "--max-update", 1, "--disable-validation", "--no-epoch-checkpoints")

RUN: dict[str, tuple[object, ...]] = {
    "python scripts/demo/segment.py": (),
    "surface-fusion preprocess": (),
    "surface-fusion train DATA --share-all-embeddings": SHORT,
    "surface-fusion train DATA --finetune-from-model": ONE_UPDATE,
    "fairseq-train DATA --user-dir CLONE/surface_fusion": (*ONE_UPDATE, "--no-save"),
    "surface-fusion average": (),
    "surface-fusion generate": ("--cpu", "--num-workers", 0, "--max-len-b", 20),
    "surface-fusion score": (),
    'echo "Where is the library?" | surface-fusion translate': (),
    'echo "Where is the library?" | surface-fusion interactive': (),
    "surface-fusion analyse all runs/demo": ("--cpu",),
}
"""Beginnings of the commands that run here, in this order, with the flags that make them short."""

PLACES = {
    "32000": "300",  # the text has too few words for more
    "CHECKPOINTS": "runs/demo/checkpoints",
    "CLONE/surface_fusion": str(ROOT / "surface_fusion"),
    "DATA": "runs/demo/data-bin",
    "PLAIN.pt": "plain/checkpoint_last.pt",
    "TEXT": str(ENRO),
    "test.ro": str(ENRO / "test.ro"),
}
"""What stands for the placeholders of the pages; PIECES with what follows it is in runs/demo/pieces."""

NOT_RUN = {
    "pip install": "downloads packages; tests/integration/test_packaging.py installs the wheel",
    "scripts/demo.sh": "takes minutes; .ci/run runs it with --quick",
    "scripts/test.sh": "runs this test",
    "scripts/docs.sh": "downloads mkdocs; test_site_has_all_pages runs its first step",
    "scripts/wmt16_enro/": "needs the data of WMT16; tests/scripts/test_wmt16_enro.py runs it on other data",
    "torchrun": "needs two machines; tests/compat/test_cpu_processes.py covers torchrun",
    "surface-fusion train DATA --surfacefusion": "tests/cli/test_training_defaults.py runs it",
    "surface-fusion train --config": "tests/cli/test_yaml_training.py runs it",
    "fairseq-train DATA --user-dir my_fusion": "tests/encoder_fusion/test_registry.py runs it",
    "fairseq-generate DATA --user-dir my_fusion": "tests/encoder_fusion/test_registry.py runs it",
    "surface-fusion analyse all checkpoints/": "tests/encoder_fusion/test_registry.py runs it",
    "python scripts/docs/": "changes docs; tests compare what it writes with the page",
}
"""Beginnings of the commands that do not run here, with the reason."""


def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def blocks(page: Path, *languages: str) -> list[str]:
    """The fenced code blocks of these languages."""
    return re.findall(rf"^```(?:{'|'.join(languages)})\n(.*?)^```", text_of(page), re.DOTALL | re.MULTILINE)


def without_fences(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)


def commands(page: Path) -> list[str]:
    """The commands in fenced shell blocks and indented blocks, one line each, without comments."""
    indented = re.findall(r"^ {4}(.*)", without_fences(page), re.MULTILINE)
    lines = "\n".join([*blocks(page, "bash", "sh"), *indented]).replace("\\\n", " ").splitlines()
    cut = (re.sub(r"\s+", " ", re.sub(r"\s# .*", "", line)).strip() for line in lines)
    return [line for line in cut if STARTS.match(line)]


COMMANDS = {(page.name, command): None for page in PAGES for command in commands(page)}
PYTHON = [
    pytest.param(code, id=f"{page.stem}-{i}")
    for page in PAGES
    if page.name != "adding_a_method.md"  # tests/encoder_fusion/test_registry.py runs its code
    for i, code in enumerate(blocks(page, "python"))
]


@pytest.mark.parametrize("page, command", COMMANDS)
def test_every_command_is_run_or_has_a_reason(page: str, command: str) -> None:
    known = [start for start in (*RUN, *NOT_RUN) if command.startswith(start)]
    assert len(known) == 1, f"{page}: add {command!r} to RUN or NOT_RUN"


@pytest.mark.parametrize("start", [*RUN, *NOT_RUN])
def test_every_entry_belongs_to_a_command(start: str) -> None:
    assert any(command.startswith(start) for _, command in COMMANDS)


@pytest.mark.parametrize("reason", sorted(set(re.findall(r"tests/\S+\.py", " ".join(NOT_RUN.values())))))
def test_every_reason_names_a_test(reason: str) -> None:
    assert (ROOT / reason).is_file()


def shell(command: list[Any], stdin: str = "") -> str:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, input=stdin, capture_output=True, text=True, timeout=300, env=environment)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def run(command: str, flags: tuple[object, ...]) -> str:
    """Run a command in the current folder, with *flags* in addition; return what it printed."""
    for name, place in PLACES.items():
        command = re.sub(rf"(?<![\w-]){re.escape(name)}(?![\w-])", lambda _, place=place: place, command)
    command = re.sub(r"\bPIECES\b", "runs/demo/pieces", command)
    echo, command, output_filter = PIPE.fullmatch(command).groups("")
    words = [*shlex.split(command), *map(str, flags)]
    if words[0] == "surface-fusion":
        out = io.StringIO()
        with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(out):
            patch.setattr(sys, "stdin", io.StringIO(f"{echo}\n"))
            assert main(words[1:]) == 0
        printed = out.getvalue()
    else:
        name = words[0].removeprefix("fairseq-")
        program = [ROOT / words[1]] if name == "python" else ["-m", f"fairseq_cli.{name}", words[1]]
        printed = shell([sys.executable, *program, *words[2:]])
    if output_filter:
        printed = shell(["bash", "-c", output_filter], printed)
    return printed


@pytest.fixture(scope="module")
def outputs(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    """What each command of ``RUN`` printed; meanwhile the current folder is the one where they ran."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("clone"))
        printed = {}
        for start, flags in RUN.items():
            if "--finetune-from-model" in start:
                plain = ("train", PLACES["DATA"], *PLAIN, *OPTIMISER, *ONE_UPDATE, "--save-dir", "plain")
                assert main([*map(str, plain)]) == 0
            command = next(command for _, command in COMMANDS if command.startswith(start))
            printed[start] = run(command, flags)
        yield printed


@pytest.mark.slow
@pytest.mark.parametrize("start", RUN)
def test_commands_run(start: str, outputs: dict[str, str]) -> None:
    printed = outputs[start]
    if "translate" in start:
        assert "read by surface" in printed
    elif "interactive" in start:
        assert len(printed.splitlines()) == 1
    elif "score" in start:
        assert "sacreBLEU" in printed and "tokenised BLEU" in printed
    elif "analyse" in start:
        assert Path("runs/demo/analysis/report.html").is_file()
    elif "average" in start:
        assert Path("averaged.pt").is_file()
    elif "--finetune" in start:
        assert Path("FINE-TUNED/checkpoint_last.pt").is_file()
    elif "fairseq-train" in start:
        assert "done training" in printed


@pytest.mark.slow
@pytest.mark.parametrize("code", PYTHON)
def test_python_blocks_run(code: str, outputs: dict[str, str]) -> None:
    names: dict[str, Any] = {}
    exec(compile(code, "page", "exec"), names)
    assert len(names) > 1  # besides __builtins__


# Links


def links(page: Path) -> list[str]:
    return re.findall(r"\]\(([^)\s]+)\)", without_fences(page))


def anchors(page: Path) -> set[str]:
    """Anchors of the headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)", without_fences(page), re.MULTILINE)
    plain = (re.sub(r"\]\([^)]*\)", "", heading).lower() for heading in headings)
    return {re.sub(r"[^\w\- ]", "", heading).strip().replace(" ", "-") for heading in plain}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_every_link_and_anchor_exists(page: Path) -> None:
    for link in links(page):
        if link.startswith("http"):
            assert link in EXTERNAL
            continue
        path, _, anchor = link.partition("#")
        target = (page.parent / path).resolve() if path else page
        assert target.exists(), link
        assert not anchor or anchor in anchors(target), link


def test_every_external_link_is_on_a_page() -> None:
    assert {link for page in PAGES for link in links(page) if link.startswith("http")} == {*EXTERNAL}


# Generated parts, and the site


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "scripts" / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_methods_page_is_current() -> None:
    text = text_of(ROOT / "docs" / "methods.md")
    assert script("methods").page(text) == text, "run python scripts/docs/methods.py"


def test_readme_lists_the_methods() -> None:
    section = text_of(ROOT / "README.md").partition("\n## Methods\n")[2].partition("\n## ")[0]
    ours = {name for name, method in methods().items() if method.__module__.startswith("surface_fusion.")}
    assert set(re.findall(r"^\| `([\w-]+)`", section, re.MULTILINE)) == ours


def test_site_has_all_pages(tmp_path: Path) -> None:
    """Each page is in the navigation, and its links lead to staged files."""
    script("stage").stage(tmp_path / "site")
    staged = {page.name for page in (tmp_path / "site").glob("*.md")}
    assert staged == {"index.md", *(page.name for page in PAGES[1:])}
    navigation = re.findall(r"^ +- (?:\w+: )?(\w+\.md)$", text_of(ROOT / "docs" / "mkdocs.yml"), re.MULTILINE)
    assert sorted(navigation) == sorted(staged)
    for page in (tmp_path / "site").rglob("*.md"):
        for link in links(page):
            assert "://" in link or (page.parent / link.partition("#")[0]).is_file() or link[0] == "#", link
