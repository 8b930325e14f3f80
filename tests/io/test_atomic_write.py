"""Files are whole or not there, and nobody else's file is touched."""

import errno
import os
import signal
import stat
from pathlib import Path

import pytest
import torch

from surface_fusion import SurfaceFusionError
from surface_fusion.io.atomic_write import TEMPORARY, WriteError, atomic_write, remove_abandoned, write_text
from tests.helpers.full_disk import files_of_at_most, names, small_disk


def test_a_text_replaces_the_file(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    write_text(path, "old")
    write_text(path, "új\n")
    assert path.read_bytes() == "új\n".encode()
    assert names(tmp_path) == ["a.txt"]


def test_a_new_file_has_the_permissions_that_open_gives(tmp_path: Path) -> None:
    before = os.umask(0o027)
    try:
        write_text(tmp_path / "a", "")
    finally:
        os.umask(before)
    assert stat.S_IMODE((tmp_path / "a").stat().st_mode) == 0o640


def test_a_file_that_is_replaced_keeps_its_permissions(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.touch()
    path.chmod(0o604)
    write_text(path, "new")
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_a_link_is_replaced_and_what_it_points_to_stays(tmp_path: Path) -> None:
    (tmp_path / "kept").write_text("kept")
    (tmp_path / "a").symlink_to(tmp_path / "kept")
    write_text(tmp_path / "a", "new")
    assert (tmp_path / "kept").read_text() == "kept" and not (tmp_path / "a").is_symlink()
    assert (tmp_path / "a").read_text() == "new"


@pytest.mark.parametrize("taken", ["file", "link"])
def test_a_temporary_name_that_is_taken_is_left_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, taken: str
) -> None:
    tokens = iter(["0" * 16, "1" * 16])
    monkeypatch.setattr("secrets.token_hex", lambda size: next(tokens))
    planted, victim = tmp_path / f".a.{'0' * 16}.tmp", tmp_path / "victim"
    victim.write_text("victim")
    planted.symlink_to(victim) if taken == "link" else planted.write_text("planted")
    write_text(tmp_path / "a", "new")
    assert victim.read_text() == "victim" and (tmp_path / "a").read_text() == "new"
    assert planted.is_symlink() if taken == "link" else planted.read_text() == "planted"


def test_a_block_that_fails_leaves_the_old_file_alone(tmp_path: Path) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    with pytest.raises(ZeroDivisionError), atomic_write(path) as file:
        file.write(b"half")
        1 / 0  # noqa: B018
    assert path.read_text() == "old" and names(tmp_path) == ["a"]


@pytest.mark.parametrize("write", ["bytes", "torch"])
def test_a_limit_on_the_size_of_files_is_named(tmp_path: Path, write: str) -> None:
    path = tmp_path / "a"
    path.write_text("old")
    line = rf"cannot write {path}: File too large; raise the limit on the size of files \(ulimit -f\)"
    with files_of_at_most(10_000), pytest.raises(WriteError, match=line), atomic_write(path) as file:
        file.write(bytes(20_000)) if write == "bytes" else torch.save(torch.zeros(9_000), file)
    assert path.read_text() == "old" and names(tmp_path) == ["a"]


def test_a_full_disk_is_named(tmp_path: Path) -> None:
    with small_disk(tmp_path / "disk", 64) as disk:
        with (
            pytest.raises(WriteError, match="No space left on device; free space, or write to another"),
            atomic_write(disk / "a") as file,
        ):
            torch.save(torch.zeros(100_000), file)
        assert names(disk) == []


def test_a_missing_folder_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(WriteError, match=r"No such file or directory; create the folder first"):
        write_text(tmp_path / "nowhere" / "a", "")
    with pytest.raises(WriteError, match=r"Not a directory; write to another path"):
        write_text(tmp_path / "file" / "a", "")


def test_a_folder_or_a_device_is_not_replaced(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "pipe")
    for path in (tmp_path, tmp_path / "pipe", Path("/dev/null")):
        with pytest.raises(SurfaceFusionError, match="is not a regular file and cannot be overwritten"):
            write_text(path, "")
    assert Path("/dev/null").is_char_device()


@pytest.mark.parametrize("name", ["n" * 255, "é" * 127])
def test_a_file_with_the_longest_valid_name_is_written(tmp_path: Path, name: str) -> None:
    write_text(tmp_path / name, "text")
    assert names(tmp_path) == [name]


def test_only_errors_of_the_file_system_are_transient() -> None:
    assert WriteError("a", OSError(errno.EIO, "Input/output error")).transient
    assert not WriteError("a", OSError(errno.ENOSPC, "No space left on device")).transient


def test_what_a_killed_process_has_left_is_removed(tmp_path: Path) -> None:
    pid = os.fork()
    if pid == 0:
        with atomic_write(tmp_path / "a") as file:
            file.write(b"half")
            file.flush()
            os.kill(os.getpid(), signal.SIGKILL)
    os.waitpid(pid, 0)
    (left,) = names(tmp_path)
    found = TEMPORARY.fullmatch(left)
    assert found is not None and found[1] == "a"
    (tmp_path / ".a.new.tmp").touch()  # a file that another program made
    with atomic_write(tmp_path / "b") as file:
        remove_abandoned(tmp_path)
        file.write(b"whole")
    assert names(tmp_path) == [".a.new.tmp", "b"] and (tmp_path / "b").read_bytes() == b"whole"
