"""Split text files into lines at line feeds only."""

import builtins
import functools
from collections.abc import Callable, Iterator
from typing import Any, Optional

import numpy as np
from fairseq import binarizer, file_chunker_utils, utils
from fairseq.data import dictionary, indexed_dataset
from fairseq.file_chunker_utils import Chunker, ChunkLineIterator
from fairseq_cli import preprocess

from surface_fusion.compat.patching import command_modules, wrap
from surface_fusion.io.lines import not_text, read_lines


def end_lines_at_line_feeds() -> None:
    """Split text only at line feeds and treat a carriage return within a line as a space.

    fairseq also splits at a lone carriage return, which misaligns the parallel text. It also does not report
    the position at which a file is not UTF-8.
    """

    def find_offsets(original: Callable[..., Any], filename: str, num_chunks: int) -> list[int]:
        with open(filename, "rb") as file:
            size = file.seek(0, 2)
            offsets = [0]
            for i in range(1, num_chunks):
                file.seek(size // num_chunks * i)
                file.readline()
                offsets.append(file.tell())
        return [*offsets, size]

    def enter(original: Callable[..., Any], chunker: Any) -> ChunkLineIterator:
        chunker.fd = open(chunker.path, "rb")  # noqa: SIM115, fairseq closes it
        return ChunkLineIterator(chunker.fd, chunker.start_offset, chunker.end_offset)

    def lines(original: Callable[..., Any], chunk: Any) -> Iterator[str]:
        file, offset, end = chunk._fd, chunk._start_offset, chunk._end_offset
        file.seek(offset)
        while (end <= 0 or offset < end) and (line := file.readline()):
            try:
                yield line.decode("utf-8-sig" if offset == 0 else "utf-8")
            except UnicodeDecodeError as error:
                file.seek(0)
                raise not_text(file.name, 1 + file.read(offset).count(b"\n"), error) from error
            offset += len(line)

    def read_data(original: Callable[..., None], dataset: Any, path: str, words: Any) -> None:
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

    for module in (file_chunker_utils, binarizer, dictionary):
        wrap(module, "find_offsets", find_offsets)
    wrap(Chunker, "__enter__", enter)
    wrap(ChunkLineIterator, "__iter__", lines)
    wrap(indexed_dataset.IndexedRawTextDataset, "read_data", read_data)
    for module in (dictionary, utils):  # dictionaries, embeddings, word alignments
        vars(module)["open"] = _open
    for module in command_modules(preprocess):  # text and its alignments
        vars(module)["open"] = functools.partial(_open, read_as="utf-8-sig")


def _open(file: Any, mode: str = "r", *args: Any, read_as: Optional[str] = None, **kwargs: Any) -> Any:
    if "b" not in mode:
        kwargs.setdefault("newline", "\n")
    if mode == "r" and read_as is not None:
        kwargs["encoding"] = read_as
    return builtins.open(file, mode, *args, **kwargs)
