"""Marks of subwords: ``\u2581word`` begins a word (sentencepiece), ``word@@`` ends none (subword-nmt)."""

from typing import Any


def subword_marks(dictionary: Any) -> str | None:
    """Return the ``--remove-bpe`` value that joins the subwords of *dictionary*; None if it has no marks."""
    words = [dictionary[i] for i in range(dictionary.nspecial, len(dictionary))]
    if any(word.startswith("\u2581") for word in words):
        return "sentencepiece"
    return "@@ " if any(word.endswith("@@") for word in words) else None


def without_marks(subword: str) -> str:
    """Remove the mark of *subword*."""
    return subword.removeprefix("\u2581").removesuffix("@@")
