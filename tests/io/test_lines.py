"""A line ends at a line feed and nowhere else, and lines are handed on when their input pauses."""

import io
import itertools
import os
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.io.lines import batches_of_lines, iterate_lines, read_lines, split_lines

NO_LINE_ENDS = "\r \v \f \x1c \x1d \x1e \x85 \u2028 \u2029"
LINES = ["first", f"a {NO_LINE_ENDS} b", "", "\r", "caf\u00e9\u2028", "last"]
TEXT = "\ufefffirst\r\n" + "".join(line + "\n" for line in LINES[1:])


def test_only_a_line_feed_ends_a_line(tmp_path: Path) -> None:
    """A carriage return before it belongs to the end, a lone one to the line."""
    path = tmp_path / "text"
    path.write_bytes(TEXT.encode())
    # Line 4 is "\r\n": an empty line with the line end of Windows.
    expected = [line if line != "\r" else "" for line in LINES]
    assert read_lines(path) == split_lines(TEXT) == expected
    assert list(iterate_lines(io.TextIOWrapper(io.BytesIO(TEXT.encode())))) == expected
    assert list(iterate_lines(io.StringIO(TEXT))) == expected
    with path.open() as file:
        assert [line for part in batches_of_lines(file, 4) for line in part] == expected
    assert [line for part in batches_of_lines(io.StringIO(TEXT), 4) for line in part] == expected


@pytest.mark.parametrize("text", ["", "\n", "a", "a\n", "a\n\n", "a\n\nb"])
def test_a_last_line_may_lack_its_line_feed(text: str, tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_text(text)
    expected = text.removesuffix("\n").split("\n") if text else []
    assert read_lines(path) == split_lines(text) == expected
    with path.open() as file:
        assert [line for part in batches_of_lines(file, 4) for line in part] == expected


def test_invalid_utf_8_is_named_by_line_and_byte(tmp_path: Path) -> None:
    path = tmp_path / "latin1.txt"
    path.write_bytes(b"fine\nsch\xf6n\n")
    with pytest.raises(SurfaceFusionError, match=r"latin1\.txt is not UTF-8 text: .* at byte 4 of line 2"):
        read_lines(path)
    with path.open("rb") as file:
        assert list(iterate_lines(file)) == ["fine", "sch\ufffdn"]


def test_lines_are_yielded_when_the_input_pauses() -> None:
    """A burst of five, a part of a line, its rest: nobody waits for the end of the input."""
    read, write = os.pipe()
    with os.fdopen(read) as stream:
        found = batches_of_lines(stream, 4, pause=0.2)
        os.write(write, b"1\n2\n3\n4\n5\nsi")
        assert (next(found), next(found)) == (["1", "2", "3", "4"], ["5"])
        os.write(write, b"x\n")
        assert next(found) == ["six"]
        later = threading.Timer(0.5, os.close, [write])
        start = time.monotonic()
        later.start()
        assert list(found) == [] and time.monotonic() - start > 0.3
        later.join()


def test_a_file_is_read_in_parts_as_its_lines_are_used(tmp_path: Path) -> None:
    """20,000 lines, of which 64 KiB and a list of 64 lines are read before the first list is used."""
    path = tmp_path / "text"
    path.write_text("".join(f"line {i}\n" for i in range(20_000)))
    with path.open() as file:
        found = batches_of_lines(file, 64)
        first = next(found)
        assert os.lseek(file.fileno(), 0, os.SEEK_CUR) <= 1 << 16
        rest = list(found)
    assert max(map(len, rest)) == len(first) == 64
    assert [*first, *(line for part in rest for line in part)] == [f"line {i}" for i in range(20_000)]


@pytest.mark.parametrize(
    "read", [iterate_lines, lambda stream: itertools.chain(*batches_of_lines(stream, 2))]
)
def test_lines_that_are_not_utf8_are_named(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, read: Callable[[Any], Iterator[str]]
) -> None:
    path = tmp_path / "text"
    path.write_bytes(b"a\nb\nthe \xff bird\nd\n")
    with open(path) as stream:
        assert list(read(stream)) == ["a", "b", "the \ufffd bird", "d"]
    assert caplog.messages == ["line 3 is not UTF-8 text: invalid start byte at byte 5; read as U+FFFD"]
