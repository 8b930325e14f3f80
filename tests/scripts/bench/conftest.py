"""Scripts of scripts/bench as modules and as commands, in this process; what they start is forked."""

import importlib
import logging
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from types import ModuleType
from typing import IO, Any

import pytest

from tests.helpers import warm_processes

BENCH = Path(__file__).parents[3] / "scripts" / "bench"


def script(name: str) -> ModuleType:
    """A script as a module; their names are free again afterwards."""
    names = {path.stem for path in BENCH.glob("*.py")}
    sys.path.insert(0, str(BENCH))
    try:
        return importlib.import_module(name)
    finally:
        sys.path.remove(str(BENCH))
        for other in names & set(sys.modules):
            del sys.modules[other]


PYTHON = "tests.helpers.warm_processes:run_python"


class ForkedPython:
    """A ``subprocess.Popen`` of a Python command, as far as the scripts use one."""

    def __init__(self, command: Sequence[object], *, stdout: IO[str], env: dict[str, str]) -> None:
        streams = {"stdout": stdout.fileno(), "stderr": stdout.fileno()}
        self._process = warm_processes.start(PYTHON, *command[1:], **streams, env=env)
        self.terminate = self._process.terminate

    @property
    def returncode(self) -> int | None:
        return self._process.exitcode

    def poll(self) -> int | None:
        return self.returncode

    def wait(self, timeout: float | None = None) -> None:
        self._process.join(timeout)
        if self.returncode is None:
            raise subprocess.TimeoutExpired(PYTHON, timeout or 0)


def run_forked(command: Sequence[object], *, env: dict[str, str], **_: Any) -> Any:
    """``subprocess.run`` of a Python command, with all that it prints as its standard output."""
    done = warm_processes.run(PYTHON, *command[1:], env=env, merge=True)
    return subprocess.CompletedProcess([*command], done.returncode, done.stdout.encode())


@pytest.fixture
def forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fork the Python commands that a script starts."""
    for name, replacement in (("run", run_forked), ("Popen", ForkedPython)):
        original = getattr(subprocess, name)

        def start(
            command: Any, *args: Any, original: Any = original, new: Any = replacement, **kwargs: Any
        ) -> Any:
            if command[0] != sys.executable:
                return original(command, *args, **kwargs)
            kwargs.pop("stderr")
            return new(command, **kwargs)

        monkeypatch.setattr(subprocess, name, start)


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, forked: None) -> Iterator[Callable[..., None]]:
    """``run("train", "--quick")`` as the command line does, without a process of its own."""
    names = (
        "fairseq",
        "surface_fusion",
        "surface_fusion.models.upgrade_state_dict",
        "fairseq_cli.preprocess",
    )
    loggers = [logging.getLogger(name) for name in names]
    before = [(logger.level, list(logger.filters)) for logger in loggers]

    def run(name: str, *flags: object) -> None:
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *map(str, flags)])
        script(name).main()

    yield run
    for logger, (level, filters) in zip(loggers, before, strict=True):
        logger.setLevel(level)
        logger.filters[:] = filters
