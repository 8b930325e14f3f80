"""Pickles that leave a file behind when they are loaded without care."""

import os
import pickle
from pathlib import Path
from typing import Any


class Touching:
    """Its unpickling runs a command that creates the file *marker*."""

    def __init__(self, marker: Path) -> None:
        self.marker = marker

    def __reduce__(self) -> tuple[Any, ...]:
        return os.system, (f"touch {self.marker}",)


def pickled(marker: Path) -> bytes:
    """The pickle of such an object."""
    return pickle.dumps(Touching(marker))


def expression(marker: Path) -> str:
    """A Python expression that creates the file *marker* when it is evaluated."""
    return f"__import__('pathlib').Path({str(marker)!r}).touch()"
