"""pyproject.toml: what the source distribution and the wheel hold and say, and that the wheel works."""

import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest
from packaging.metadata import Metadata
from packaging.requirements import Requirement

from surface_fusion import __version__
from tests.helpers.paths import ROOT

pytestmark = pytest.mark.slow

BUILT_FROM = ("pyproject.toml", "MANIFEST.in", "README.md", "CHANGELOG.md", "LICENSE")
FOLDERS = ("surface_fusion", "configs", "docs", "scripts", "tests")


def run(*command: object, cwd: Path, **variables: str) -> str:
    done = subprocess.run(
        list(map(str, command)),
        cwd=cwd,
        env={**os.environ, "PIP_NO_INDEX": "1", "PIP_DISABLE_PIP_VERSION_CHECK": "1", **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def files_below(folder: Path) -> set[str]:
    """Files that belong to the source, relative to the root."""
    return {
        str(path.relative_to(ROOT))
        for path in folder.rglob("*")
        if path.is_file() and "__pycache__" not in path.parts and path.suffix != ".pyc"
    }


@pytest.fixture(scope="module")
def dist(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the sdist, and the wheel that was built from the sdist."""
    source = tmp_path_factory.mktemp("source")
    for name in BUILT_FROM:
        if (ROOT / name).exists():  # a missing one shows in the sdist
            shutil.copy(ROOT / name, source)
    for name in FOLDERS:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    out = tmp_path_factory.mktemp("dist")
    run(sys.executable, "-m", "build", "--no-isolation", "--outdir", out, source, cwd=out)
    return out


@pytest.fixture(scope="module")
def wheel(dist: Path) -> zipfile.ZipFile:
    (path,) = dist.glob("*.whl")
    assert path.name == f"surface_fusion-{__version__}-py3-none-any.whl"
    return zipfile.ZipFile(path)


@pytest.fixture(scope="module")
def metadata(wheel: zipfile.ZipFile) -> Metadata:
    return Metadata.from_email(wheel.read(f"surface_fusion-{__version__}.dist-info/METADATA"))


@pytest.fixture(scope="module")
def site(dist: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, installed in a folder of its own."""
    target = tmp_path_factory.mktemp("site")
    (path,) = dist.glob("*.whl")
    run(sys.executable, "-m", "pip", "install", "--no-deps", "--target", target, path, cwd=target)
    return target


def test_sdist_holds_the_files_that_the_tests_need(dist: Path) -> None:
    (path,) = dist.glob("*.tar.gz")
    top = f"surface_fusion-{__version__}/"
    with tarfile.open(path) as archive:
        names = {m.name.removeprefix(top) for m in archive.getmembers() if m.isfile()}
    expected = set(BUILT_FROM).union(*(files_below(ROOT / folder) for folder in FOLDERS))
    assert expected - names == set()
    assert {n for n in names - expected if not n.startswith("surface_fusion.egg-info/")} == {
        "PKG-INFO",
        "setup.cfg",
    }


def test_wheel_holds_the_package_and_nothing_else(wheel: zipfile.ZipFile) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    assert names == files_below(ROOT / "surface_fusion")
    assert "surface_fusion/py.typed" in names


def test_wheel_holds_the_licence(wheel: zipfile.ZipFile) -> None:
    text = wheel.read(f"surface_fusion-{__version__}.dist-info/licenses/LICENSE").decode()
    assert text == (ROOT / "LICENSE").read_text()
    assert text.startswith("MIT License")


def test_metadata(metadata: Metadata) -> None:
    assert metadata.name == "surface-fusion"
    assert str(metadata.version) == __version__
    assert metadata.license_expression == "MIT"
    assert metadata.description_content_type == "text/markdown"
    assert set(metadata.provides_extra or ()) == {"bpe", "docs", "plot", "test"}
    supported = metadata.requires_python
    assert supported is not None
    assert [v for v in ("3.9", "3.10", "3.11", "3.12", "3.13", "3.14") if v in supported] == [
        "3.10",
        "3.11",
        "3.12",
        "3.13",
    ]
    assert all(requirement.url is None for requirement in metadata.requires_dist or ())


@pytest.mark.parametrize(
    ("system", "machine", "python", "expected"),
    [
        ("linux", "x86_64", "3.10", "fairseq-fixed==0.12.3.1"),
        ("linux", "x86_64", "3.11", "ve-fairseq==0.12.3"),
        ("linux", "x86_64", "3.12", "ve-fairseq==0.12.3"),
        ("linux", "x86_64", "3.13", "fairseq-fixed==0.12.3.1"),
        ("linux", "aarch64", "3.11", "fairseq-fixed==0.12.3.1"),
        ("darwin", "arm64", "3.12", "fairseq-fixed==0.12.3.1"),
    ],
)
def test_each_platform_has_one_requirement_of_fairseq(
    metadata: Metadata, system: str, machine: str, python: str, expected: str
) -> None:
    environment = {"sys_platform": system, "platform_machine": machine, "python_version": python, "extra": ""}

    def applies(requirement: Requirement) -> bool:
        return requirement.marker is None or requirement.marker.evaluate(environment)

    wanted = [r for r in metadata.requires_dist or () if "fairseq" in r.name and applies(r)]
    assert [f"{r.name}{r.specifier}" for r in wanted] == [expected]


def test_the_installed_wheel_is_imported_from_its_own_folder(site: Path) -> None:
    code = "import surface_fusion; print(surface_fusion.__file__, surface_fusion.__version__)"
    printed = run(sys.executable, "-c", code, cwd=site, PYTHONPATH=str(site)).splitlines()
    assert printed[-1] == f"{site / 'surface_fusion' / '__init__.py'} {__version__}"


def test_installed_command(site: Path) -> None:
    printed = run(site / "bin" / "surface-fusion", "--version", cwd=site, PYTHONPATH=str(site))
    assert __version__ in printed


@pytest.mark.parametrize("user_dir", ["installed", "checkout"])
def test_installed_and_user_dir_at_once(site: Path, user_dir: str) -> None:
    """A process has imported the installed package and is given a user dir: the same files, or other ones."""
    folder = {"installed": site, "checkout": ROOT}[user_dir] / "surface_fusion"
    code = f"""
import argparse, surface_fusion
from fairseq.models import ARCH_MODEL_REGISTRY
from fairseq.utils import import_user_module
import_user_module(argparse.Namespace(user_dir={str(folder)!r}))
print(ARCH_MODEL_REGISTRY["transformer_surface_fusion"].__module__)
"""
    printed = run(sys.executable, "-c", code, cwd=site, PYTHONPATH=str(site)).splitlines()
    assert printed[-1] == "surface_fusion.models.transformer_surface_fusion"
