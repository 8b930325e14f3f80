"""Split text files into lines at line feeds only; a carriage return within a line is a space.

fairseq also splits at a lone carriage return, which misaligns the parallel text. Errors name the line that is
not UTF-8, and byte order marks are skipped.
"""

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
from fairseq.file_chunker_utils import ChunkLineIterator

from surface_fusion.io.lines import not_utf8_error, read_lines


def find_line_feeds(find_offsets: Callable[..., Any], filename: str, num_chunks: int) -> list[int]:
    """fairseq's ``find_offsets``: byte offsets at which *num_chunks* parts begin, and the file's size."""
    with open(filename, "rb") as file:
        size = file.seek(0, 2)
        offsets = [0]
        for i in range(1, num_chunks):
            file.seek(size // num_chunks * i)
            file.readline()
            offsets.append(file.tell())
    return [*offsets, size]


def open_bytes(enter: Callable[..., Any], chunker: Any) -> ChunkLineIterator:
    """fairseq's ``Chunker.__enter__``; opens a binary file, for :func:`decode_lines`."""
    chunker.fd = open(chunker.path, "rb")  # noqa: SIM115, fairseq closes it
    return ChunkLineIterator(chunker.fd, chunker.start_offset, chunker.end_offset)


def decode_lines(iterate: Callable[..., Any], chunk: Any) -> Iterator[str]:
    """fairseq's ``ChunkLineIterator.__iter__``, which yields the lines of a part of a file.

    Raises:
        SurfaceFusionError: a line is not UTF-8; the message has its number.
    """
    file, offset, end = chunk._fd, chunk._start_offset, chunk._end_offset
    file.seek(offset)
    while (end <= 0 or offset < end) and (line := file.readline()):
        try:
            yield line.decode("utf-8-sig" if offset == 0 else "utf-8")
        except UnicodeDecodeError as error:
            file.seek(0)
            raise not_utf8_error(file.name, 1 + file.read(offset).count(b"\n"), error) from error
        offset += len(line)


def read_raw_text(read_data: Callable[..., None], dataset: Any, path: str, words: Any) -> None:
    """fairseq's ``IndexedRawTextDataset.read_data``."""
    dataset.lines = read_lines(path)
    dataset.tokens_list = [
        words.encode_line(
            line,
            add_if_not_exist=False,
            append_eos=dataset.append_eos,
            reverse_order=dataset.reverse_order,
        ).long()
        for line in dataset.lines
    ]
    dataset.sizes = np.array([len(tokens) for tokens in dataset.tokens_list])


def open_text(open_file: Callable[..., Any], file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """The builtin ``open`` as fairseq's modules call it, with ``newline="\\n"``."""
    if "b" not in mode:
        kwargs.setdefault("newline", "\n")
    return open_file(file, mode, *args, **kwargs)


def open_marked_text(open_file: Callable[..., Any], file: Any, mode: str = "r", **kwargs: Any) -> Any:
    """:func:`open_text`; skips a byte order mark of a file that is read."""
    if mode == "r":
        kwargs["encoding"] = "utf-8-sig"
    return open_text(open_file, file, mode, **kwargs)
