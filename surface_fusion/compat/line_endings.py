"""Split text files into lines at line feeds only; a carriage return within a line is a space.

fairseq also splits at a lone carriage return, which misaligns the parallel text. Errors name the line that is
not UTF-8, and byte order marks are skipped.
"""

from collections.abc import Iterator
from typing import Any

import numpy as np
from fairseq.file_chunker_utils import ChunkLineIterator

from surface_fusion.compat.patching import Original, repair
from surface_fusion.io.lines import not_utf8_error, read_lines


@repair(
    "fairseq.file_chunker_utils.find_offsets",
    "fairseq.binarizer.find_offsets",
    "fairseq.data.dictionary.find_offsets",
    probe="carriage_return_breaks_offsets",
)
def find_line_feeds(find_offsets: Original, filename: str, num_chunks: int) -> list[int]:
    """Begin the parts of a file after line feeds; fairseq also begins them after a carriage return.

    Returns:
        Byte offsets at which *num_chunks* parts begin, and the file's size.
    """
    with open(filename, "rb") as file:
        size = file.seek(0, 2)
        offsets = [0]
        for i in range(1, num_chunks):
            file.seek(size // num_chunks * i)
            file.readline()
            offsets.append(file.tell())
    return [*offsets, size]


@repair("fairseq.file_chunker_utils.Chunker.__enter__", probe="carriage_return_ends_line")
def open_bytes(enter: Original, chunker: Any) -> ChunkLineIterator:
    """Open parts of a text file as bytes, which are split at line feeds only."""
    chunker.fd = open(chunker.path, "rb")  # noqa: SIM115, fairseq closes it
    return ChunkLineIterator(chunker.fd, chunker.start_offset, chunker.end_offset)


@repair("fairseq.file_chunker_utils.ChunkLineIterator.__iter__", probe="line_of_bad_text_is_not_named")
def decode_lines(iterate: Original, chunk: Any) -> Iterator[str]:
    """Yield the lines of a part of a file; an error for text that is not UTF-8 names the file and line."""
    file, offset, end = chunk._fd, chunk._start_offset, chunk._end_offset
    file.seek(offset)
    while (end <= 0 or offset < end) and (line := file.readline()):
        try:
            yield line.decode("utf-8-sig" if offset == 0 else "utf-8")
        except UnicodeDecodeError as error:
            file.seek(0)
            raise not_utf8_error(file.name, 1 + file.read(offset).count(b"\n"), error) from error
        offset += len(line)


@repair("fairseq.data.indexed_dataset.IndexedRawTextDataset.read_data", probe="carriage_return_ends_raw_line")
def read_raw_text(read_data: Original, dataset: Any, path: str, words: Any) -> None:
    """Split the files of ``--dataset-impl raw`` at line feeds only."""
    dataset.lines = read_lines(path)
    settings = {"append_eos": dataset.append_eos, "reverse_order": dataset.reverse_order}
    dataset.tokens_list = [
        words.encode_line(line, add_if_not_exist=False, **settings).long() for line in dataset.lines
    ]
    dataset.sizes = np.array([len(tokens) for tokens in dataset.tokens_list])


@repair("fairseq.utils.open", probe="carriage_return_ends_embedding")
@repair("fairseq.data.dictionary.open", probe="carriage_return_ends_dictionary_line")
def open_text(open_file: Original, file: Any, mode: str = "r", *args: Any, **kwargs: Any) -> Any:
    """Split dictionaries and files of embeddings or word alignments at line feeds only."""
    if "b" not in mode:
        kwargs.setdefault("newline", "\n")
    return open_file(file, mode, *args, **kwargs)


@repair("fairseq_cli.preprocess.open", probe="alignments_are_read_with_mark")
def open_marked_text(open_file: Original, file: Any, mode: str = "r", **kwargs: Any) -> Any:
    """Split the text of ``preprocess --alignfile`` at line feeds only, and skip its byte order mark."""
    if mode == "r":
        kwargs["encoding"] = "utf-8-sig"
    return open_text(open_file, file, mode, **kwargs)
