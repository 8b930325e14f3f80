"""Text files that ``preprocess`` reads: sentences are paired by line feeds alone."""

import itertools
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from fairseq.data.indexed_dataset import IndexedRawTextDataset
from fairseq.file_chunker_utils import Chunker, find_offsets

from surface_fusion.cli.main import main
from surface_fusion.errors import SurfaceFusionError

LINES = 60
NO_LINE_ENDS = ("\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")


def corpus(folder: Path) -> None:
    """60 pairs; line i has the words ``w{i}`` and ``x{i}`` and between them what ends no line."""
    for language, shift in (("en", 0), ("ro", 20)):
        lines = [f"w{i} x{i}" for i in range(LINES)]
        for i, character in enumerate(NO_LINE_ENDS):
            lines[i + shift] = f"w{i + shift} {character} x{i + shift}"
        end = "\r\n" if language == "ro" else "\n"
        text = "\ufeff" + "".join(line + end for line in lines)
        (folder / f"train.{language}").write_bytes(text.encode())


@pytest.mark.parametrize("workers", [1, 3])
def test_sentences_stay_paired(workers: int, tmp_path: Path) -> None:
    corpus(tmp_path)
    languages = ("-s", "en", "-t", "ro", "--joined-dictionary", "--workers", str(workers))
    argv = ["preprocess", *languages, "--trainpref", str(tmp_path / "train"), "--destdir", str(tmp_path)]
    assert main(argv) == 0
    words = Dictionary.load(str(tmp_path / "dict.en.txt"))
    assert {f"{letter}{i}" for letter in "wx" for i in range(LINES)} <= set(words.symbols)
    for language in ("en", "ro"):
        data = data_utils.load_indexed_dataset(str(tmp_path / f"train.en-ro.{language}"), words)
        assert [words.string(data[i]) for i in range(len(data))] == [f"w{i} x{i}" for i in range(LINES)]


def test_alignments_stay_with_their_sentences(tmp_path: Path) -> None:
    corpus(tmp_path)
    alignments = tmp_path / "alignments"
    alignments.write_text("0-0 1-1\n" * LINES)
    argv = ["preprocess", "-s", "en", "-t", "ro", "--trainpref", str(tmp_path / "train")]
    assert main([*argv, "--alignfile", str(alignments), "--destdir", str(tmp_path / "out")]) == 0
    found = (tmp_path / "out" / "alignment.en-ro.txt").read_text().split("\n")
    assert {*found} == {f"{letter}{i} {letter}{i}" for letter in "wx" for i in range(LINES)} | {""}


def test_raw_text_has_as_many_sentences_as_lines(tmp_path: Path) -> None:
    corpus(tmp_path)
    words = Dictionary()
    for i in range(LINES):
        words.add_symbol(f"w{i}")
    data = IndexedRawTextDataset(str(tmp_path / "train.ro"), words)
    assert len(data) == len(data.sizes) == LINES
    assert data.get_original_text(20) == "w20 \r x20" and data.get_original_text(19) == "w19 x19"
    assert words.string(data[59][:1]) == "w59"


@pytest.mark.parametrize("chunks", [1, 2, 7, 100])
def test_each_line_is_in_one_chunk(chunks: int, tmp_path: Path) -> None:
    corpus(tmp_path)
    path = str(tmp_path / "train.en")
    offsets = find_offsets(path, chunks)
    found = []
    for start, end in itertools.pairwise(offsets):
        with Chunker(path, start, end) as lines:
            found += list(lines)
    assert len(offsets) == chunks + 1
    assert [line.split()[0] for line in found] == [f"w{i}" for i in range(LINES)]


def test_bytes_that_are_no_text_are_named_by_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "train.en"
    path.write_bytes(b"fine\n" * 40 + b"sch\xf6n\n")
    offsets = find_offsets(str(path), 3)
    with (
        Chunker(str(path), *offsets[2:]) as lines,
        pytest.raises(SurfaceFusionError, match="byte 4 of line 41"),
    ):
        list(lines)
    argv = ["preprocess", "--only-source", "-s", "en", "--trainpref", str(tmp_path / "train")]
    assert main([*argv, "--destdir", str(tmp_path / "out")]) == 2
    assert f"{path} is not UTF-8 text: invalid start byte at byte 4 of line 41" in capsys.readouterr().err
