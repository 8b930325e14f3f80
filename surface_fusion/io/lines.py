"""Read UTF-8 lines that end at line feeds only.

A line ends with a line feed, optionally preceded by a carriage return. No other character ends a line: not a
lone carriage return, nor VT, FF, FS, GS, RS, U+0085, U+2028 or U+2029, at which ``str.splitlines`` or
Python's text files split. Text is UTF-8; a leading byte order mark is removed.
"""

import io
import itertools
import logging
import os
import select
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)

BYTE_ORDER_MARK = "\ufeff"

PAUSE = 0.05
"""Seconds without input after which :func:`batches_of_lines` yields a partial list."""


def without_line_end(line: str) -> str:
    """Remove the line feed at the end of *line*, and a carriage return before it."""
    return line[:-1].removesuffix("\r") if line.endswith("\n") else line


def split_lines(text: str) -> list[str]:
    """Split *text* into lines; the last line may lack its line feed."""
    file = io.StringIO(text.removeprefix(BYTE_ORDER_MARK), newline="\n")
    return [without_line_end(line) for line in file]


def not_utf8_error(name: str, line: int, error: UnicodeDecodeError) -> SurfaceFusionError:
    """Return the error for the file *name* whose line number *line* is not UTF-8."""
    return SurfaceFusionError(
        f"{name} is not UTF-8 text: {error.reason} at byte {error.start + 1} of line {line}; convert the "
        "file to UTF-8"
    )


def read_lines(path: str | Path) -> list[str]:
    """Read the lines of the file *path*.

    Raises:
        SurfaceFusionError: the file is not UTF-8; the message names the line.
    """
    lines = []
    with open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            try:
                lines.append(without_line_end(line.decode("utf-8-sig" if number == 1 else "utf-8")))
            except UnicodeDecodeError as error:
                raise not_utf8_error(str(path), number, error) from error
    return lines


def iterate_lines(stream: Any) -> Iterator[str]:
    """Yield the lines of *stream* as they arrive; bytes that are not UTF-8 become U+FFFD, with a warning.

    Args:
        stream: a text stream such as ``sys.stdin``, or a binary one.
    """
    for number, line in enumerate(getattr(stream, "buffer", stream), 1):
        yield _text(line, number)


def _text(line: str | bytes, number: int) -> str:
    """Line *number* without its end or a byte order mark; a warning is logged if it is not UTF-8."""
    try:
        text = line if isinstance(line, str) else line.decode("utf-8")
    except UnicodeDecodeError as error:
        logger.warning(
            f"line {number} is not UTF-8 text: {error.reason} at byte {error.start + 1}; read as U+FFFD"
        )
        text = error.object.decode("utf-8", "replace")
    return without_line_end(text.removeprefix(BYTE_ORDER_MARK) if number == 1 else text)


def batches_of_lines(stream: Any, size: int, pause: float = PAUSE) -> Iterator[list[str]]:
    """Yield lists of *size* lines; shorter ones at the end and after *pause* seconds without input.

    Bytes that are not UTF-8 become U+FFFD, with a warning. At most one list and 64 KiB after it are in
    memory.

    Args:
        stream: a text stream such as ``sys.stdin``, of which nothing has been read.
        size: maximum number of lines per list.
        pause: in seconds.
    """
    try:
        descriptor = stream.fileno()
        poll = select.poll()
        poll.register(descriptor, select.POLLIN)
    except (AttributeError, OSError):  # a stream in memory, or a system without poll
        lines = iterate_lines(stream)
        while batch := list(itertools.islice(lines, size)):
            yield batch
        return
    incomplete: list[bytes] = []  # parts of the last line
    ready: list[bytes] = []
    number, ended = 0, False
    while ready or not ended:
        # Read the descriptor directly: poll does not see the content of Python's buffers.
        chunk = None
        if not ended and len(ready) < size and poll.poll(1000 * pause if ready else None):
            chunk = os.read(descriptor, 1 << 16)
        if chunk:
            *whole, last = chunk.split(b"\n")
            for line in whole:
                ready.append(b"".join((*incomplete, line, b"\n")))
                incomplete.clear()
            incomplete.append(last)
        elif chunk is not None:
            ended = True
            ready += filter(None, [b"".join(incomplete)])
        if ready and (not chunk or len(ready) >= size):
            yield [_text(line, number + i) for i, line in enumerate(ready[:size], 1)]
            number, ready = number + len(ready[:size]), ready[size:]
