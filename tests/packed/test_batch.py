"""Every token once, in order, whatever the padding; and capacities that hold their batches."""

from itertools import accumulate

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surface_fusion.ops.packed_rows import PackedRows
from surface_fusion.packed.batch import (
    PAD_SENTENCES,
    Capacity,
    PackedBatch,
    capacity_for,
    pack,
    pack_static,
)
from tests.helpers.tiny import PAD, pad_rows

LENGTHS = st.lists(st.tuples(st.integers(1, 9), st.integers(1, 9)), min_size=1, max_size=12)


class Batch:
    """Sentences of these (source, target) lengths, numbered tokens, padded as fairseq does.

    Args:
        left: whether padding stands to the left, of the source and of the target.
        extra: columns of padding alone, of the source and of the target.
    """

    def __init__(
        self, lengths: list[tuple[int, int]], left: tuple[bool, bool], extra: tuple[int, int]
    ) -> None:
        def numbered(side: int, first: int) -> list[Tensor]:
            counts = [pair[side] for pair in lengths]
            return list((torch.arange(sum(counts)) + first).split(counts))

        self.src, self.prev, self.target = numbered(0, 10), numbered(1, 1000), numbered(1, 2000)
        self.matrices = (
            pad_rows(self.src, left[0], extra[0]),
            pad_rows(self.prev, left[1], extra[1]),
            pad_rows(self.target, left[1], extra[1]),
        )
        sentences, src_width = self.matrices[0].shape
        self.shape = sentences, src_width, self.matrices[1].shape[1]
        self.capacity = capacity_for(*self.shape, sum(map(len, self.target)))

    def packed(self) -> PackedBatch:
        return pack(*self.matrices, PAD)

    def packed_static(self, capacity: Capacity) -> PackedBatch:
        flat = torch.full((3, capacity.padded), PAD)
        for static, matrix in zip(flat, self.matrices, strict=True):
            static[: matrix.numel()] = matrix.flatten()
        return pack_static(*flat, torch.tensor(self.shape), capacity, PAD)


batches = st.builds(
    Batch,
    LENGTHS,
    left=st.tuples(st.booleans(), st.booleans()),
    extra=st.tuples(st.integers(0, 3), st.integers(0, 3)),
)


def assert_rows(rows: PackedRows, sentences: list[Tensor]) -> None:
    """The rows start with these sentences."""
    n = sum(map(len, sentences))
    assert rows.tokens[:n].equal(torch.cat(sentences))
    assert rows.sentence[:n].tolist() == [i for i, s in enumerate(sentences) for _ in s]
    assert rows.positions[:n].tolist() == [j for s in sentences for j in range(len(s))]
    starts = accumulate(map(len, sentences), initial=0)
    assert rows.starts[: len(sentences) + 1].tolist() == list(starts)


@settings(deadline=None)
@given(batches)
def test_every_token_is_packed_once_in_order(batch: Batch) -> None:
    packed = batch.packed()
    assert_rows(packed.src, batch.src)
    assert_rows(packed.tgt, batch.prev)
    assert packed.target.equal(torch.cat(batch.target))
    for rows, sentences in ((packed.src, batch.src), (packed.tgt, batch.prev)):
        assert len(rows.tokens) == sum(map(len, sentences)) and len(rows.starts) == len(sentences) + 1


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(0, 200), st.integers(0, 200), st.integers(0, 2000))
def test_static_shapes_start_with_the_same_rows(batch: Batch, src: int, tgt: int, padded: int) -> None:
    own = batch.capacity
    capacity = Capacity(own.src + src, own.tgt + tgt, own.padded + padded)  # perhaps another batch's
    assert capacity.covers(own)
    packed = batch.packed_static(capacity)
    assert_rows(packed.src, batch.src)
    assert_rows(packed.tgt, batch.prev)
    n = len(torch.cat(batch.target))
    assert packed.target[:n].equal(torch.cat(batch.target))
    assert len(packed.target) == capacity.tgt and packed.target[n:].eq(PAD).all()
    for rows, size in ((packed.src, capacity.src), (packed.tgt, capacity.tgt)):
        assert len(rows.starts) == capacity.padded + PAD_SENTENCES + 1
        for x in (rows.tokens, rows.sentence, rows.positions):
            assert len(x) == size and x.dtype == torch.int64


@settings(max_examples=60, deadline=None)
@given(batches, st.integers(0, 200))
def test_remaining_rows_are_padding_sentences_of_similar_length(batch: Batch, more: int) -> None:
    own, sentences = batch.capacity, batch.shape[0]
    packed = batch.packed_static(Capacity(own.src + more, own.tgt + more, own.padded))
    for rows, n in ((packed.src, batch.src), (packed.tgt, batch.prev)):
        start = sum(map(len, n))
        assert rows.tokens[start:].eq(PAD).all()
        lengths = rows.starts.diff()
        padding = lengths[sentences : sentences + PAD_SENTENCES]
        assert padding.sum() == len(rows.tokens) - start
        assert padding.min() >= 1 and padding.max() - padding.min() <= 1
        assert lengths[sentences + PAD_SENTENCES :].eq(0).all() and rows.starts[-1] == len(rows.tokens)
        assert rows.sentence.equal(torch.arange(len(lengths)).repeat_interleave(lengths))
        assert rows.positions.equal(torch.arange(len(rows.tokens)) - rows.starts[rows.sentence])


@settings(deadline=None)
@given(st.integers(1, 3000), st.integers(1, 300), st.integers(1, 300), st.floats(0, 1))
def test_a_capacity_covers_its_batch_with_little_excess(
    sentences: int, src_width: int, tgt_width: int, full: float
) -> None:
    tgt_rows = max(round(full * sentences * tgt_width), sentences)
    capacity = capacity_for(sentences, src_width, tgt_width, tgt_rows)
    padded = sentences * max(src_width, tgt_width)
    assert capacity.src >= sentences * src_width + PAD_SENTENCES
    assert capacity.tgt >= tgt_rows + PAD_SENTENCES
    assert capacity.padded >= padded
    step = padded / 16 + 64
    assert capacity.src < sentences * src_width + PAD_SENTENCES + step
    assert capacity.tgt < tgt_rows + PAD_SENTENCES + step
    assert capacity.padded < padded + 1024
    assert capacity.covers(capacity)


@pytest.mark.parametrize("smaller", ["src", "tgt", "padded"])
def test_a_capacity_covers_batches_that_are_not_larger_in_any_size(smaller: str) -> None:
    sizes = {"src": 128, "tgt": 192, "padded": 1024}
    capacity, less = Capacity(**sizes), Capacity(**sizes | {smaller: sizes[smaller] - 1})
    assert capacity.covers(capacity) and capacity.covers(less) and not less.covers(capacity)


def test_a_target_token_costs_twice_a_source_token() -> None:
    assert Capacity(src=100, tgt=10, padded=1).cost == 120


def test_similar_batches_share_a_capacity() -> None:
    """What CUDA graphs live on: real batches of one length differ a little in sentences and tokens."""
    made = {capacity_for(n, 25, 27, 24 * n) for n in range(150, 166)}
    assert len(made) <= 4
