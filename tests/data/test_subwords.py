"""Which marks the subwords of a dictionary have."""

import pytest
from fairseq.data import Dictionary

from surface_fusion.data.subwords import subword_marks, without_marks


@pytest.mark.parametrize(
    ("words", "marks"), [(["\u2581a", "b"], "sentencepiece"), (["a@@", "b"], "@@ "), (["a", "b"], None)]
)
def test_subwords_are_joined_by_their_marks(words: list[str], marks: str | None) -> None:
    """Scores of subwords were taken for scores of text."""
    dictionary = Dictionary()
    for word in words:
        dictionary.add_symbol(word)
    assert subword_marks(dictionary) == marks


@pytest.mark.parametrize("subword", ["\u2581a", "a@@", "a"])
def test_a_mark_is_removed(subword: str) -> None:
    assert without_marks(subword) == "a"
