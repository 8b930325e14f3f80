"""``preprocess``, ``generate`` and ``analyse`` leave whole files, or none."""

import os
import signal
import time
from pathlib import Path

import pytest

from surface_fusion.io.atomic_write import create_folder, remove_abandoned
from tests.helpers.full_disk import files_of_at_most, names, small_disk
from tests.helpers.small_training import PREPROCESS, TEXT


def binarised(folder):
    """The content of a data folder, without its log."""
    return {path.name: path.read_bytes() for path in folder.iterdir() if path.suffix != ".log"}


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("limit", [100, 5_000])
def test_preprocess_leaves_nothing_of_a_failure(command, tmp_path, limit, workers):
    """The first limit stops it at the dictionary, the second at the training set."""
    out = tmp_path / "data"
    with files_of_at_most(limit):
        result = command("preprocess", *PREPROCESS, "--destdir", out, "--workers", workers)
    assert result.status == 2
    assert result.err.splitlines()[-1] == (
        f"surface-fusion preprocess: error: cannot write {out}: File too large; raise the limit on the size "
        "of files (ulimit -f)"
    )
    assert "Traceback" not in result.err
    assert not out.exists()


def test_preprocess_leaves_an_earlier_folder_as_it_was(command, data, tmp_path):
    out = tmp_path / "data"
    assert command("preprocess", *PREPROCESS, "--destdir", out).status == 0
    before = {path.name: path.read_bytes() for path in out.iterdir()}
    again = ("preprocess", *PREPROCESS, "--destdir", out, "--srcdict", out / "dict.ro.txt")
    (out / "dict.ro.txt").rename(out / "kept.txt")
    (out / "dict.en.txt").unlink()
    again = (*again[:-1], out / "kept.txt")
    with files_of_at_most(5_000):
        assert command(*again).status == 2
    left = {path.name: path.read_bytes() for path in out.iterdir()}
    assert left == {
        **{name: content for name, content in before.items() if not name.startswith("dict.")},
        "kept.txt": before["dict.ro.txt"],
    }
    assert command(*again).status == 0
    assert binarised(out) == {**binarised(data), "kept.txt": before["dict.ro.txt"]}


def test_preprocess_removes_the_folder_of_a_killed_one(command, data, tmp_path):
    out, ready = tmp_path / "data", tmp_path / "ready"
    pid = os.fork()
    if pid == 0:
        out.mkdir()
        folder, _ = create_folder(out, "preprocess")
        Path(folder, "train.bin").touch()
        ready.touch()
        time.sleep(600)
    try:
        while not ready.exists():
            time.sleep(0.05)
        remove_abandoned(out)
        assert len(names(out)) == 1, "it is still running"
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
    assert command("preprocess", *PREPROCESS, "--destdir", out).status == 0
    assert binarised(out) == binarised(data) and not [name for name in names(out) if name.endswith(".tmp")]


def test_preprocess_on_a_full_disk(command, tmp_path):
    with small_disk(tmp_path / "disk", 32) as disk:
        result = command("preprocess", *PREPROCESS, "--destdir", disk / "data")
        assert result.status == 2
        assert f"cannot write {disk}/data: No space left on device; free space" in result.err
        assert "Traceback" not in result.err and names(disk) == []


def test_preprocess_names_the_folder_that_was_given(command, data, tmp_path):
    out = tmp_path / "data"
    result = command("preprocess", *PREPROCESS, "--destdir", out)
    assert result.status == 0 and f"Wrote preprocessed data to {out}" in result.err
    assert ".preprocess." not in result.err
    log = (out / "preprocess.log").read_text()
    assert f"Wrote preprocessed data to {out}" in log and ".preprocess." not in log
    assert binarised(out) == binarised(data)


def test_preprocess_writes_no_other_dictionary_over_one(command, data):
    before = binarised(data)
    result = command("preprocess", *PREPROCESS, "--destdir", data)
    assert result.status == 2
    assert f"{data}/dict.en.txt already exists; remove it or write to another path" in result.err
    assert binarised(data) == before


def test_preprocess_adds_to_a_folder(command, data, tmp_path):
    out = tmp_path / "data"
    out.mkdir()
    (out / "notes").write_text("mine")
    (out / "preprocess.log").write_text("an earlier line\n")
    dictionary = data / "dict.en.txt"
    argv = ("-s", "en", "-t", "ro", "--srcdict", dictionary, "--tgtdict", dictionary)
    assert command("preprocess", *argv, "--testpref", TEXT / "test", "--destdir", out).status == 0
    assert (out / "notes").read_text() == "mine"
    assert (out / "preprocess.log").read_text().startswith("an earlier line\n")
    assert (out / "test.en-ro.en.bin").read_bytes() == (data / "test.en-ro.en.bin").read_bytes()


def test_preprocess_without_reading_anything_leaves_nothing(command, tmp_path):
    argv = ("-s", "en", "-t", "ro", "--trainpref", tmp_path / "nowhere", "--destdir", tmp_path / "data")
    assert command("preprocess", *argv).status == 2
    assert not (tmp_path / "data").exists()


@pytest.mark.slow
def test_results_of_generate_are_whole_or_not_there(command, data, checkpoint, tmp_path):
    out = tmp_path / "results" / "generate-test.txt"
    argv = ("generate", data, "--path", checkpoint, "--cpu", "--num-workers", 0, "--max-len-b", 10)
    argv += ("--results-path", out.parent)
    assert command(*argv).status == 0
    whole = out.read_text(encoding="utf-8")
    assert whole.count("\nH-") + whole.startswith("H-") == 40 and "Generate test with beam=5" in whole
    with files_of_at_most(500):
        result = command(*argv)
    assert result.status == 2
    assert result.err.splitlines()[-1] == (
        f"surface-fusion generate: error: cannot write {out}: File too large; raise the limit on the size of "
        "files (ulimit -f)"
    )
    assert "Traceback" not in result.err
    assert out.read_text(encoding="utf-8") == whole and names(out.parent) == [out.name]


def test_analyse_leaves_whole_files(command, data, checkpoint, tmp_path):
    argv = ("analyse", "branches", checkpoint, data, "--cpu", "-o", tmp_path / "out")
    (tmp_path / "out").mkdir()
    victim = tmp_path / "victim"
    victim.write_text("victim")
    (tmp_path / "out" / ".report.html.new").symlink_to(victim)
    (tmp_path / "out" / ".branches.csv.new").write_text("mine")
    with files_of_at_most(300):
        result = command(*argv)
    assert result.status == 2
    assert result.err.splitlines()[-1] == (
        f"surface-fusion analyse: error: cannot write {tmp_path}/out/branches.csv: File too large; raise the "
        "limit on the size of files (ulimit -f)"
    )
    assert not [name for name in names(tmp_path / "out") if name.endswith(".tmp")]
    assert command(*argv).status == 0
    assert victim.read_text() == "victim"
    assert (tmp_path / "out" / ".branches.csv.new").read_text() == "mine"
