"""``--remove-bpe`` that does not fit the dictionary is said; one that does is not."""

import io
from pathlib import Path

import pytest
from fairseq.data import Dictionary

from surface_fusion.cli.subwords import hint

WORDS = {"sentencepiece": ("\u2581Tom", "s"), "subword_nmt": ("To@@", "m"), "whole": ("Tom", "is")}
BOTH = ("--bpe", "sentencepiece", "--sentencepiece-model", "spm.model")


def dictionary(kind: str) -> Dictionary:
    words = Dictionary()
    for word in WORDS[kind]:
        words.add_symbol(word)
    return words


@pytest.mark.parametrize(
    ("kind", "argv", "line"),
    [
        ("sentencepiece", ("--remove-bpe", "--beam", "4"), "(\u2581); give --remove-bpe sentencepiece"),
        ("sentencepiece", ("--remove-bpe=@@ ",), "(\u2581); give --remove-bpe sentencepiece"),
        ("sentencepiece", ("--post-process", "subword_nmt"), "(\u2581); give --remove-bpe sentencepiece"),
        (
            "sentencepiece",
            (*BOTH, "--remove-bpe", "sentencepiece"),
            "lose their spaces; leave --remove-bpe out",
        ),
        ("sentencepiece", (*BOTH, "--remove-bpe"), "(\u2581); leave it out, as --bpe joins them"),
        ("subword_nmt", ("--remove-bpe", "sentencepiece"), "every space"),
        ("subword_nmt", ("--remove-bpe", "sentencepiece"), "; give --remove-bpe without a value"),
        ("whole", ("--remove-bpe", "sentencepiece"), "; leave it out"),
        ("sentencepiece", ("--remove-bpe", "sentencepiece"), None),
        ("sentencepiece", BOTH, None),
        ("sentencepiece", (*BOTH, "--remove-bpe", "none"), None),
        ("sentencepiece", (), None),
        ("subword_nmt", ("--remove-bpe",), None),
        ("whole", ("--remove-bpe",), None),
    ],
)
def test_remove_bpe_that_does_not_fit_the_dictionary_gives_a_hint(
    kind: str, argv: tuple[str, ...], line: str | None
) -> None:
    said = hint(argv, dictionary(kind))
    assert said is None if line is None else line in said


@pytest.mark.slow
def test_interactive_and_generate_print_the_hint_once(
    command, checkpoint: Path, data: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("Tom is here.\nTom.\n"))
    flags = ("--path", checkpoint, "--beam", 1, "--max-len-b", 5, "--cpu", "--remove-bpe", "sentencepiece")
    for verb, more in (("interactive", ()), ("generate", ("--max-tokens", 2000))):
        result = command(verb, data, *flags, *more)
        assert result.status == 0
        lines = [line for line in result.err.splitlines() if "warning: --remove-bpe" in line]
        assert len(lines) == 1 and lines[0].startswith(
            f"surface-fusion {verb}: warning: --remove-bpe sentence"
        )
