"""Marks of subwords: ``\u2581word`` begins a word (sentencepiece), ``word@@`` ends none (subword-nmt)."""

from collections.abc import Iterable
from typing import Any


def subword_marks(dictionary: Any) -> str | None:
    """Return the ``--remove-bpe`` value that joins the subwords of *dictionary*; None if it has no marks."""
    return marks_of_words(dictionary[i] for i in range(dictionary.nspecial, len(dictionary)))


def marks_of_words(entries: Iterable[str]) -> str | None:
    """:func:`subword_marks` of the *entries* of a dictionary."""
    words = list(entries)
    if any(word.startswith("\u2581") for word in words):
        return "sentencepiece"
    return "@@ " if any(word.endswith("@@") for word in words) else None


def without_marks(subword: str) -> str:
    """Remove the mark of *subword*."""
    return subword.removeprefix("\u2581").removesuffix("@@")
