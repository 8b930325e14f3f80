"""``--user-dir`` may name a copy of the imported package."""

import argparse
import logging
import shutil
import sys
import zipfile
from pathlib import Path

import pytest
from fairseq import utils

from surface_fusion import SurfaceFusionError


def copy_of_the_package(folder: Path, user_dir: Path) -> Path:
    return Path(
        shutil.copytree(user_dir, folder / "surface_fusion", ignore=shutil.ignore_patterns("__pycache__"))
    )


def is_the_package(module: object, user_dir: Path) -> bool:
    file = getattr(module, "__file__", None)
    return file is not None and Path(file).resolve() == user_dir / "__init__.py"


def test_the_imported_package_may_be_the_user_dir(user_dir: Path, tmp_path: Path) -> None:
    link = tmp_path / "surface_fusion"
    link.symlink_to(user_dir)
    for path in (user_dir, link):
        utils.import_user_module(argparse.Namespace(user_dir=str(path)))
    copies = [name for name, module in sys.modules.items() if is_the_package(module, user_dir)]
    assert copies == ["surface_fusion"]


def test_a_second_checkout_is_reported_and_not_loaded(
    user_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = copy_of_the_package(tmp_path, user_dir)
    with caplog.at_level(logging.WARNING):
        utils.import_user_module(argparse.Namespace(user_dir=str(elsewhere)))
    assert f"--user-dir {elsewhere}" in caplog.text and "is already imported" in caplog.text


def test_a_second_checkout_of_another_version_is_refused(user_dir: Path, tmp_path: Path) -> None:
    elsewhere = copy_of_the_package(tmp_path, user_dir)
    (elsewhere / "version.py").write_text('__version__ = "9.9.9"\n')
    with pytest.raises(SurfaceFusionError, match=r"surface-fusion 9\.9\.9, but 0\.1\.0 is already imported"):
        utils.import_user_module(argparse.Namespace(user_dir=str(elsewhere)))


def test_another_plugin_is_imported(tmp_path: Path) -> None:
    plugin = tmp_path / "a_plugin_of_somebody_else"
    plugin.mkdir()
    (plugin / "__init__.py").touch()
    utils.import_user_module(argparse.Namespace(user_dir=str(plugin)))
    assert plugin.name in sys.modules


@pytest.mark.parametrize(
    ("path", "fault"),
    [
        ("nowhere/surface_fusion", "does not exist; give the folder"),
        ("plugin.zip", "is a file; give a folder"),
        ("plugin.zip/surface_fusion", "is in an archive; unpack that"),
    ],
)
def test_a_missing_folder_and_an_archive_are_named(tmp_path: Path, path: str, fault: str) -> None:
    with zipfile.ZipFile(tmp_path / "plugin.zip", "w") as archive:
        archive.writestr("surface_fusion/__init__.py", "")
    with pytest.raises(SurfaceFusionError, match=f"--user-dir {tmp_path / path} {fault}"):
        utils.import_user_module(argparse.Namespace(user_dir=str(tmp_path / path)))


def test_a_link_to_the_imported_package_is_that_package(user_dir: Path, tmp_path: Path) -> None:
    link = tmp_path / "another_name"
    link.symlink_to(user_dir)
    utils.import_user_module(argparse.Namespace(user_dir=str(link)))
    assert "another_name" not in sys.modules
