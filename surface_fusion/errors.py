"""The exception for user errors, and functions that make parts of its messages."""

import difflib
from collections.abc import Iterable
from typing import Any


class SurfaceFusionError(ValueError):
    """A user error: one line that says what was wrong, with the value, and what to do.

    ``surface-fusion`` prints the line and exits with status 2; under plain ``fairseq-*``
    commands the same line is the text of the exception.
    """


def shorten(text: str, length: int) -> str:
    """The first *length* characters of *text* and an ellipsis, or *text* if it is not longer."""
    return text if len(text) <= length else f"{text[:length]} ..."


def unknown_setting(fault: str, name: Any, known: Iterable[str]) -> SurfaceFusionError:
    """Return the error *fault*, which suggests the name in *known* that is closest to *name*."""
    close = difflib.get_close_matches(str(name), known, n=1)
    return SurfaceFusionError(f"{fault}; " + (f"did you mean {close[0]}?" if close else "remove it"))
