"""Fixtures that several test files share, and the selection of ``-m "not slow"``."""

import gc
import logging
import os
from collections import defaultdict
from collections.abc import Callable
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # the models are tiny: more threads are slower

import pytest

import surface_fusion
from surface_fusion.cli.main import main
from tests.helpers import warm_processes
from tests.helpers.small_training import PREPROCESS

USER_DIR = Path(surface_fusion.__file__).parent

RunFairseq = Callable[..., warm_processes.Ended]


QUICK_CASES = 4
"""Cases of a parametrised test that run with ``-m "not slow"``."""


@pytest.hookimpl(tryfirst=True)  # before pytest deselects by -m
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark cases of tests with many parameters as slow, except ``QUICK_CASES``, evenly spread."""
    cases = defaultdict(list)
    for item in items:
        cases[item.nodeid.partition("[")[0]].append(item)
    for several in cases.values():
        quick = {i * len(several) // QUICK_CASES for i in range(QUICK_CASES)}
        for i, item in enumerate(several):
            if len(several) > QUICK_CASES and i not in quick:
                item.add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """Exempt what has been imported from garbage collection, a sixth of the time of loading a model."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def checkpoint_messages_are_logged() -> None:
    """Remove the filter that the entry point adds to this logger for the rest of its process."""
    logging.getLogger("surface_fusion.models.upgrade_state_dict").filters.clear()


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Binarised text: the data folder for the flags in ``helpers/small_training.py``."""
    folder = tmp_path_factory.mktemp("data-bin")
    assert main(["preprocess", *map(str, PREPROCESS), "--destdir", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def user_dir() -> Path:
    """The value of ``--user-dir``: the folder of the package."""
    return USER_DIR


@pytest.fixture(scope="session")
def run_fairseq() -> RunFairseq:
    """Function that runs a console command of fairseq in a new process and returns its output.

    ``run_fairseq("generate", DATA, "--beam", 4)`` runs ``fairseq-generate`` with ``--user-dir``. A
    failure is an error, unless ``check=False``. *text* is its standard input. Standard error is part of the
    standard output.
    """

    def run(verb: str, *args: object, check: bool = True, text: str = "") -> warm_processes.Ended:
        if verb == "generate" and "--num-workers" not in args:
            # fairseq forks its data worker from a thread, which now and then hangs on a busy machine.
            args += ("--num-workers", 0)
        flags = (*args, "--user-dir", USER_DIR)
        done = warm_processes.run(f"fairseq_cli.{verb}:cli_main", *flags, text=text, merge=True)
        assert not check or done.returncode == 0, done.stdout[-5000:]
        return done

    return run
