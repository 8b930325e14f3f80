"""Lines of text, as everything in this package reads them.

A line ends at a line feed; a carriage return right before it belongs to the line's end. No other character
ends a line: not a lone carriage return, nor VT, FF, FS, GS, RS, U+0085, U+2028 or U+2029, at which
``str.splitlines`` or Python's text files cut. Text is UTF-8; a byte order mark at its start is no text.
"""

import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surface_fusion.errors import SurfaceFusionError

BYTE_ORDER_MARK = "\ufeff"
PAUSE = 0.05
"""Seconds without new input after which the lines that are there are handed on."""


def without_line_end(line: str) -> str:
    """*line* without the line feed at its end, and without a carriage return before that."""
    if line.endswith("\n"):
        line = line[:-1]
        line = line[:-1] if line.endswith("\r") else line
    return line


def split_lines(text: str) -> list[str]:
    """The lines of *text*; a last line may lack its line feed."""
    lines = text.removeprefix(BYTE_ORDER_MARK).split("\n")
    last = lines.pop()
    return [*(line.removesuffix("\r") for line in lines), *([last] if last else [])]


def not_text(name: str, line: int, error: UnicodeDecodeError) -> SurfaceFusionError:
    """The error of the file *name* whose line number *line* is not UTF-8."""
    return SurfaceFusionError(
        f"{name} is not UTF-8 text: {error.reason} at byte {error.start + 1} of line {line}; convert the "
        "file to UTF-8"
    )


def read_lines(path: str | Path) -> list[str]:
    """The lines of the file *path*.

    Raises:
        SurfaceFusionError: the file is not UTF-8; with the line.
    """
    lines = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append(without_line_end(line.decode("utf-8-sig" if number == 1 else "utf-8")))
            except UnicodeDecodeError as error:
                raise not_text(str(path), number, error) from error
    return lines


def typed_lines(stream: Any) -> Iterator[str]:
    """The lines of *stream* as they come; what is no UTF-8 becomes U+FFFD.

    Args:
        stream: a text stream such as ``sys.stdin``, or a binary one.
    """
    source, first = getattr(stream, "buffer", stream), True
    while line := source.readline():
        text = line if isinstance(line, str) else line.decode("utf-8", "replace")
        yield without_line_end(text.removeprefix(BYTE_ORDER_MARK) if first else text)
        first = False


def bursts(stream: Any, at_most: int, pause: float = PAUSE) -> Iterator[list[str]]:
    """The lines of *stream* in lists of 1 to *at_most*, none of which waits for lines that are still to come.

    A list is full, or nothing more came for *pause* seconds. What is no UTF-8 becomes U+FFFD. At most one
    list and 64 KiB behind it are held in memory.

    Args:
        stream: a text stream such as ``sys.stdin``, of which nothing has been read.
        at_most: lines of a list.
        pause: in seconds.
    """
    try:
        descriptor = stream.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
    except (AttributeError, OSError):  # a stream in memory, or a system without poll: nothing to wait for
        yield from _groups(typed_lines(stream), at_most)
        return
    begun: list[bytes] = []  # the parts of a line whose end is still to come
    ready: list[bytes] = []
    first, ended = True, False
    while ready or not ended:
        # The file is read without Python's buffers, for poll knows nothing of what they hold.
        chunk = None
        if not ended and len(ready) < at_most and poll.poll(1000 * pause if ready else None):
            chunk = os.read(descriptor, 1 << 16)
        if chunk:
            *whole, last = chunk.split(b"\n")
            for line in whole:
                ready.append(b"".join((*begun, line, b"\n")))
                begun.clear()
            begun.append(last)
        elif chunk is not None:
            ended = True
            ready += filter(None, [b"".join(begun)])
        if ready and (not chunk or len(ready) >= at_most):
            part, ready = ready[:at_most], ready[at_most:]
            lines = [without_line_end(line.decode("utf-8", "replace")) for line in part]
            if first:
                lines[0], first = lines[0].removeprefix(BYTE_ORDER_MARK), False
            yield lines


def _groups(lines: Iterator[str], at_most: int) -> Iterator[list[str]]:
    group = []
    for line in lines:
        group.append(line)
        if len(group) == at_most:
            yield group
            group = []
    if group:
        yield group
