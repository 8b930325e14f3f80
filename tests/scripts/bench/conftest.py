"""Scripts of scripts/bench as modules and as commands, in this process."""

import importlib
import logging
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest

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


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
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
