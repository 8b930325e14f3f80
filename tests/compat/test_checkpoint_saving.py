"""Checkpoints are whole or not there, and what prevents saving is one line."""

import os
import shutil
import time
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager

from surface_fusion import SurfaceFusionError
from surface_fusion.cli.main import main
from surface_fusion.compat import checkpoint_saving
from surface_fusion.io.atomic_write import WriteError
from tests.helpers.full_disk import files_of_at_most, names, small_disk
from tests.helpers.small_training import TRAIN

SAVES = ("--save-interval-updates", 2, "--optimizer", "flat_adam")


def train(data: Path, save_dir: Path, *flags: object) -> int:
    return main([*map(str, ("train", data, *TRAIN, *SAVES, "--save-dir", save_dir, *flags))])


def one_line(capsys: pytest.CaptureFixture[str]) -> str:
    """What the verb printed to stderr."""
    err = capsys.readouterr().err
    assert err.startswith("surface-fusion train: error: ") and err.count("\n") == 1, err
    return err


def whole(path: Path) -> int:
    """The updates of a checkpoint that loads."""
    return int(torch.load(path)["optimizer_history"][-1]["num_updates"])


@pytest.fixture(autouse=True)
def contained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


# -- one file -------------------------------------------------------------------------------------


def test_a_failed_copy_leaves_the_old_file_intact(tmp_path: Path) -> None:
    new, last = tmp_path / "new.pt", tmp_path / "last.pt"
    new.write_bytes(b"n" * 20_000)
    last.write_bytes(b"o" * 20_000)
    with files_of_at_most(10_000), pytest.raises(SurfaceFusionError, match=r"last\.pt: File too large"):
        PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_bytes() == b"o" * 20_000 and names(tmp_path) == ["last.pt", "new.pt"]


def test_a_copy_has_the_same_bytes(tmp_path: Path) -> None:
    new, last = tmp_path / "new.pt", tmp_path / "last.pt"
    new.write_bytes(os.urandom(3 << 20))
    assert PathManager.copy(str(new), str(last), overwrite=True)
    assert last.read_bytes() == new.read_bytes()


def test_a_copy_replaces_a_link_instead_of_its_target(tmp_path: Path) -> None:
    """A user who links checkpoint_last.pt to an earlier checkpoint keeps that."""
    (tmp_path / "new.pt").write_text("new")
    (tmp_path / "earlier.pt").write_text("earlier")
    (tmp_path / "last.pt").symlink_to(tmp_path / "earlier.pt")
    PathManager.copy(str(tmp_path / "new.pt"), str(tmp_path / "last.pt"), overwrite=True)
    assert (tmp_path / "earlier.pt").read_text() == "earlier"
    assert (tmp_path / "last.pt").read_text() == "new"


def test_a_failed_save_ends_at_once_and_leaves_no_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time, "sleep", lambda seconds: pytest.fail("retried"))
    path = tmp_path / "a.pt"
    path.write_text("old")
    with files_of_at_most(10_000), pytest.raises(SurfaceFusionError, match="earlier checkpoints are intact"):
        checkpoint_utils.torch_persistent_save({"a": torch.zeros(9_000)}, str(path))
    assert path.read_text() == "old" and names(tmp_path) == ["a.pt"]


@pytest.mark.parametrize(("failures", "saved"), [(2, True), (3, False)])
def test_a_transient_error_is_retried_twice(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: int, saved: bool
) -> None:
    """Each time from the beginning: fairseq appends to what the first attempt has written."""
    attempts = []

    def save(obj: Any, file: Any) -> None:
        attempts.append(1)
        file.write(b"half" if len(attempts) <= failures else b"whole")
        if len(attempts) <= failures:
            raise WriteError("a.pt", OSError(5, "Input/output error"))

    monkeypatch.setattr(torch, "save", save)
    monkeypatch.setattr(checkpoint_saving, "PAUSE", 0)
    if saved:
        checkpoint_utils.torch_persistent_save({}, "a.pt")
        assert (tmp_path / "a.pt").read_bytes() == b"whole"
    else:
        with pytest.raises(SurfaceFusionError, match="Input/output error"):
            checkpoint_utils.torch_persistent_save({}, "a.pt")
        assert names(tmp_path) == []
    assert len(attempts) == 3


# -- a training -----------------------------------------------------------------------------------


def test_a_file_size_limit_reached_while_saving_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The estimate leaves out what is small; here a training gets past it."""
    save_dir = tmp_path / "checkpoints"
    assert train(data, save_dir, "--max-update", 2) == 0
    before = {path.name: path.read_bytes() for path in save_dir.iterdir()}
    capsys.readouterr()
    with files_of_at_most((save_dir / "checkpoint_last.pt").stat().st_size - 100):
        assert train(data, save_dir, "--max-update", 4, "--keep-interval-updates", 1) == 2
    line = one_line(capsys)
    assert f"cannot write {save_dir}/checkpoint_1_4.pt: File too large; raise the limit" in line
    assert "earlier checkpoints are intact; rerun the command to resume from the last one" in line
    assert {path.name: path.read_bytes() for path in save_dir.iterdir()} == before
    assert train(data, save_dir, "--max-update", 4) == 0
    assert whole(save_dir / "checkpoint_last.pt") == 4


@pytest.mark.slow
def test_a_disk_full_at_the_last_copy_is_one_line(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """``--keep-interval-updates`` removes nothing before the new checkpoints are whole."""
    with small_disk(tmp_path / "disk", 1600) as disk:
        assert train(data, disk / "a", "--max-update", 2) == 0
        capsys.readouterr()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(checkpoint_saving, "MOMENTS", {})  # an estimate that is far too small
            assert train(data, disk / "a", "--max-update", 6, "--keep-interval-updates", 1) == 2
        assert "checkpoint_best.pt: No space left on device; free space" in one_line(capsys)
        assert {name: whole(disk / "a" / name) for name in names(disk / "a")} == {
            "checkpoint_1_2.pt": 2,
            "checkpoint_1_4.pt": 4,
            "checkpoint_best.pt": 2,
            "checkpoint_last.pt": 2,
        }
        assert os.system(f"mount -o remount,size=4m {disk}") == 0
        assert train(data, disk / "a", "--max-update", 6, "--keep-interval-updates", 1) == 0
        assert whole(disk / "a" / "checkpoint_last.pt") == 6


@pytest.mark.slow
def test_too_little_space_is_reported_before_training(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    free = Namespace(total=10_000_000, used=9_500_000, free=500_000)
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: free)
    assert train(data, tmp_path / "a", "--max-update", 2) == 2
    line = one_line(capsys)
    assert f"--save-dir {tmp_path}/a has 500 kB free, but the first save needs" in line
    assert "3 files of about" in line and "(weights" in line and "optimizer state" in line
    assert names(tmp_path / "a") == []
    assert train(data, tmp_path / "a", "--max-update", 2, "--no-epoch-checkpoints", "--no-save") == 0


def test_a_file_size_limit_is_reported_before_training(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with files_of_at_most(100_000):
        assert train(data, tmp_path / "a", "--max-update", 2) == 2
    assert "this process may write files of at most 100 kB; raise that limit" in one_line(capsys)


@pytest.mark.parametrize(
    "flags", [(), ("--optimizer", "adam"), ("--no-save-optimizer-state",), ("--optimizer", "sgd")]
)
def test_the_estimated_size_is_close_to_the_written_size(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: tuple[str, ...]
) -> None:
    estimates = []
    original = checkpoint_saving.checkpoint_size

    def remembered(trainer: Any) -> tuple[int, int]:
        estimates.append(sum(original(trainer)))
        return original(trainer)

    monkeypatch.setattr(checkpoint_saving, "checkpoint_size", remembered)
    assert train(data, tmp_path / "a", "--max-update", 1, *flags) == 0
    size = (tmp_path / "a" / "checkpoint_last.pt").stat().st_size
    structure = 130_000  # names, configuration and the zip's table, which do not grow with the model
    assert size - structure < estimates[0] <= size


@pytest.mark.slow
def test_a_folder_that_cannot_be_created_is_named(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").write_text("a file")
    for place in (tmp_path / "file", tmp_path / "file" / "sub"):
        assert train(data, place, "--max-update", 1) == 2
        assert f"--save-dir {place}: " in one_line(capsys)
    assert (tmp_path / "file").read_text() == "a file"


def test_a_read_only_folder_is_named(data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        assert os.system(f"mount -o remount,ro {disk}") == 0
        assert train(data, disk, "--max-update", 1) == 2
        line = one_line(capsys)
        assert (
            f"--save-dir {disk}: " in line and "Read-only file system; write to a folder that you may" in line
        )


def test_a_removed_folder_is_created_again(data: Path, tmp_path: Path, monkeypatch: Any) -> None:
    save, removed = checkpoint_utils.save_checkpoint, []

    def vanish_first(cfg: Any, *args: Any) -> Any:
        if not removed:
            removed.append(shutil.rmtree(cfg.save_dir))
        return save(cfg, *args)

    monkeypatch.setattr(checkpoint_utils, "save_checkpoint", vanish_first)
    assert train(data, tmp_path / "a", "--max-update", 4) == 0
    assert whole(tmp_path / "a" / "checkpoint_last.pt") == 4


@pytest.mark.slow
def test_files_of_the_user_in_the_folder_are_kept(data: Path, tmp_path: Path) -> None:
    """fairseq writes and removes ``dummy`` to see whether it can."""
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / "dummy").write_text("mine")
    (tmp_path / "a" / "checkpoint_last.pt.tmp").write_text("mine")
    assert train(data, tmp_path / "a", "--max-update", 1) == 0
    assert (tmp_path / "a" / "dummy").read_text() == "mine"
    assert (tmp_path / "a" / "checkpoint_last.pt.tmp").read_text() == "mine"


def test_the_next_start_removes_temporary_files_of_a_killed_one(data: Path, tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    (tmp_path / "a" / f".checkpoint_last.pt.{'0' * 16}.tmp").write_text("half")
    assert train(data, tmp_path / "a", "--max-update", 1) == 0
    assert not [name for name in names(tmp_path / "a") if name.endswith(".tmp")]
