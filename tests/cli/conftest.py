"""The entry point in this process, a small data set, and a checkpoint trained on it."""

import logging
from dataclasses import dataclass
from pathlib import Path

import pytest

from surface_fusion.cli.main import main
from tests.helpers.small_training import PREPROCESS, TRAIN


@dataclass
class Result:
    """How a command line ended."""

    status: int
    out: str
    err: str


@pytest.fixture
def command(capsys):
    """``command("train", DATA, "--lr", 0.1)``: exit status and what was printed."""

    def run(*argv):
        capsys.readouterr()
        status = main([*map(str, argv)])
        printed = capsys.readouterr()
        return Result(status, printed.out, printed.err)

    return run


@pytest.fixture(autouse=True)
def contained(tmp_path, monkeypatch):
    """fairseq's commands write where they run, replace the root logger's handlers and set PYTHONWARNINGS."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONWARNINGS", raising=False)
    root = logging.getLogger()
    before, level = list(root.handlers), root.level
    yield
    root.handlers[:] = before
    root.setLevel(level)


@pytest.fixture(scope="session")
def data(tmp_path_factory) -> Path:
    """The binarised text."""
    folder = tmp_path_factory.mktemp("data")
    assert main(["preprocess", *map(str, PREPROCESS), "--destdir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def save_dir(data, tmp_path_factory) -> Path:
    """The folder of a training of two epochs: checkpoint1.pt, checkpoint2.pt, ..."""
    folder = tmp_path_factory.mktemp("checkpoints")
    argv = ["train", str(data), *map(str, TRAIN), "--save-dir", str(folder), "--max-epoch", "2"]
    assert main(argv) == 0
    return folder


@pytest.fixture(scope="session")
def checkpoint(save_dir) -> Path:
    """The last checkpoint of that training."""
    return save_dir / "checkpoint_last.pt"


@pytest.fixture
def refused(command):
    """``refused("train", ...)``: the one line, without the name of the command."""

    def run(verb, *argv):
        result = command(verb, *argv)
        lines = [line for line in result.err.splitlines() if " | INFO | " not in line]
        assert result.status == 2
        assert len(lines) == 1, lines
        start = f"surface-fusion {verb}: error: "
        assert lines[0].startswith(start)
        return lines[0].removeprefix(start)

    return run
