"""Fixtures that several test files share."""

import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # tiny models: threads only get in each other's way

import pytest

import surface_fusion
from surface_fusion.cli.main import main
from tests.helpers.small_training import PREPROCESS

USER_DIR = Path(surface_fusion.__file__).parent

RunFairseq = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def checkpoints_say_errors() -> None:
    """The entry point filters that logger until its process ends; here other tests come after it."""
    logging.getLogger("surface_fusion.models.upgrade_state_dict").filters.clear()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The data folder of ``helpers/small_training.py``."""
    folder = tmp_path_factory.mktemp("data-bin")
    assert main(["preprocess", *map(str, PREPROCESS), "--destdir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def user_dir() -> Path:
    """What a user gives to ``--user-dir``."""
    return USER_DIR


@pytest.fixture(scope="session")
def run_fairseq() -> RunFairseq:
    """``run_fairseq("generate", DATA, "--beam", 4, ...)``: the plain console command, in a new process.

    ``--user-dir`` is added. ``check=False`` lets it fail; stderr is part of stdout.
    """

    def run(verb: str, *args: object, check: bool = True) -> subprocess.CompletedProcess[str]:
        script = Path(sys.executable).with_name(f"fairseq-{verb}")
        command = [str(script)] if script.exists() else [sys.executable, "-m", f"fairseq_cli.{verb}"]
        if verb == "generate" and "--num-workers" not in args:
            # fairseq forks its data worker from a thread, which now and then hangs on a busy machine.
            args += ("--num-workers", 0)
        done = subprocess.run(
            [*command, *map(str, args), "--user-dir", str(USER_DIR)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        assert not check or done.returncode == 0, done.stdout[-5000:]
        return done

    return run
