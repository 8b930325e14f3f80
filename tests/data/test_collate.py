"""The same matrix as fairseq's own function makes, whatever is asked of it."""

from typing import Any

import pytest
import torch
from fairseq.data import data_utils
from hypothesis import given
from hypothesis import strategies as st

import surface_fusion  # noqa: F401  (puts ours in its place)
from surface_fusion.data.collate import collate_tokens

fairseqs = data_utils.collate_tokens.__wrapped__
PAD = 1


def sentences(lengths: list[int], **kind: Any) -> list[torch.Tensor]:
    start = 10
    return [torch.arange(start + 100 * i, start + 100 * i + n, **kind) for i, n in enumerate(lengths)]


def never(*args: Any) -> Any:
    raise AssertionError


@given(
    st.lists(st.integers(1, 9), min_size=1, max_size=6),
    st.tuples(
        *(st.sampled_from([None, 2]), st.booleans(), st.booleans()),
        *(st.sampled_from([None, 4, 12]), st.sampled_from([1, 8]), st.sampled_from([None, 3, 8])),
    ),
)
def test_as_fairseqs(lengths: list[int], options: tuple[Any, ...]) -> None:
    values = sentences(lengths)
    got = collate_tokens(never, values, PAD, *options)
    expected = fairseqs(values, PAD, *options)
    assert got.dtype == expected.dtype and torch.equal(got, expected)


@pytest.mark.parametrize(
    "values",
    [
        [*sentences([3]), torch.empty(0, dtype=torch.int64)],
        [*sentences([3]), *sentences([2], dtype=torch.int32)],
        [torch.ones(2, 3)],
    ],
    ids=["empty", "two dtypes", "matrices"],
)
def test_what_is_unusual_is_left_to_fairseq(values: list[torch.Tensor]) -> None:
    given: list[Any] = []
    collate_tokens(lambda *args: given.append(args), values, PAD, 2, left_pad=True)  # type: ignore[arg-type,return-value]
    assert given == [(values, PAD, 2, True, False, None, 1, None)]


def test_it_is_in_its_place() -> None:
    assert data_utils.collate_tokens.__wrapped__ is not data_utils.collate_tokens
    assert data_utils.collate_tokens(sentences([2, 1]), PAD).tolist() == [[10, 11], [110, PAD]]
