"""Faults in reading text files: a carriage return within a line, bytes that are not UTF-8."""

import argparse
import contextlib
import pkgutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from fairseq import utils
from fairseq.data import Dictionary
from fairseq.data.indexed_dataset import IndexedRawTextDataset
from fairseq.file_chunker_utils import Chunker
from fairseq_cli import preprocess

from tests.compat.probes.expect import error_of, fails


@contextlib.contextmanager
def _file(content: bytes) -> Iterator[str]:
    with tempfile.NamedTemporaryFile() as file:
        file.write(content)
        file.flush()
        yield file.name


def carriage_return_breaks_offsets(owner: str) -> bool:
    with _file(b"aaaaaaaaa\rb\nc\n") as name:
        return pkgutil.resolve_name(owner).find_offsets(name, 2) != [0, 12, 14]


def _read(name: str) -> list[str]:
    with Chunker(name, 0, Path(name).stat().st_size) as lines:
        return list(lines)


def carriage_return_ends_line() -> bool:
    with _file(b"a \r b\nc\n") as name:
        return len(_read(name)) == 3


def line_of_bad_text_is_not_named() -> bool:
    with _file(b"a\n\xff\n") as name:
        error = error_of(_read, name)
        return error is not None and name not in str(error)


def carriage_return_ends_raw_line() -> bool:
    with _file(b"a \r b\nc\n") as name:
        return len(IndexedRawTextDataset(name, Dictionary())) == 3


def carriage_return_ends_dictionary_line() -> bool:
    with _file(b"a\rb 3\nc 2\n") as name:
        return fails(Dictionary.load, name, error=ValueError)


def carriage_return_ends_embedding() -> bool:
    with _file(b"1 2\na\rb 0.1 0.2\n") as name:
        return set(utils.parse_embedding(name)) == {"a", "b"}


def alignments_are_read_with_mark() -> bool:
    """The first word of a file with a byte order mark is unknown, and is not aligned."""
    words = Dictionary()
    words.add_symbol("a")
    with tempfile.TemporaryDirectory() as folder:
        for language in ("en", "ro"):
            Path(folder, f"train.{language}").write_bytes(b"\xef\xbb\xbfa\n")
        Path(folder, "align").write_text("0-0\n")
        args = argparse.Namespace(source_lang="en", target_lang="ro", destdir=folder)
        args.trainpref, args.alignfile = f"{folder}/train", f"{folder}/align"
        preprocess._align_files(args, words, words)
        return Path(folder, "alignment.en-ro.txt").read_text() == ""
