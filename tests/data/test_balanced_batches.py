"""Batches of one update cost the same on all GPUs, and none is lost but what fairseq leaves out."""

from typing import Any

import numpy as np
import pytest
from fairseq.data import FairseqDataset
from fairseq.data.iterators import EpochBatchIterator

from surface_fusion.data.balanced_batches import balance_batches
from surface_fusion.packed.batch import capacity_for


class Pairs(FairseqDataset):
    """Sentence pairs of random lengths, as fairseq's dataset tells their sizes."""

    def __init__(self) -> None:
        rng = np.random.RandomState(0)
        self.src_sizes = np.sort(rng.randint(3, 60, 600))
        self.tgt_sizes = np.maximum(self.src_sizes + rng.randint(-20, 20, 600), 3)

    def __len__(self) -> int:
        return len(self.src_sizes)

    def __getitem__(self, i: int) -> int:
        return i

    def num_tokens(self, i: int) -> int:
        return int(max(self.src_sizes[i], self.tgt_sizes[i]))

    def collater(self, samples: list[int]) -> list[int]:
        return samples

    def cost(self, batch: list[int]) -> int:
        return int(self.src_sizes[batch].sum() + 2 * self.tgt_sizes[batch].sum())


def epoch(dataset: Pairs, shard: int, *, shards: int = 2, wrapped: bool = True, grouped: bool = True) -> Any:
    batches = [list(range(i, min(i + 12, 600))) for i in range(0, 600, 12)]
    iterator = EpochBatchIterator(
        dataset, dataset.collater, batches, num_shards=shards, shard_id=shard, grouped_shuffling=grouped
    )
    if wrapped:
        for _ in range(2):  # the trainer asks once an epoch
            balance_batches(iterator, rounded=False)
    return list(iterator.next_epoch_itr(shuffle=True))


def imbalance(dataset: Pairs, **how: bool) -> float:
    costs = np.array([[dataset.cost(batch) for batch in epoch(dataset, shard, **how)] for shard in (0, 1)])
    return float(costs.max(axis=0).sum() / costs.mean(axis=0).sum())


def test_batches_of_one_update_cost_the_same() -> None:
    dataset = Pairs()
    assert imbalance(dataset, wrapped=False) > 1.03
    assert imbalance(dataset) < 1.02


@pytest.mark.parametrize("cuda", [False, True])
def test_on_gpus_rounded_costs_are_above_all_alike(cuda: bool) -> None:
    """A CUDA graph takes equally long for any batch that fits. In batches of several sizes and widths."""
    dataset, rng = Pairs(), np.random.RandomState(1)
    ends = np.cumsum(rng.randint(100, 200, 5))
    batches = [part.tolist() for part in np.split(np.arange(600), ends[ends < 600])]
    batches += [rng.choice(600, rng.randint(100, 300), replace=False).tolist() for _ in range(60)]

    def rounded(batch: list[int]) -> int:
        src, tgt = dataset.src_sizes[batch], dataset.tgt_sizes[batch]
        return capacity_for(len(batch), int(src.max()), int(tgt.max()), int(tgt.sum())).cost

    iterator = EpochBatchIterator(dataset, dataset.collater, batches, num_shards=2, grouped_shuffling=True)
    balance_batches(iterator, rounded=cuda)
    found = iterator.frozen_batches
    assert sorted(found) == sorted(batches)
    if cuda:
        assert found == tuple(sorted(batches, key=lambda x: (rounded(x), dataset.cost(x)), reverse=True))
    else:
        assert found == tuple(sorted(batches, key=dataset.cost, reverse=True))


def test_the_set_of_batches_equals_fairseqs() -> None:
    dataset = Pairs()
    got = [batch for shard in (0, 1) for batch in epoch(dataset, shard)]
    assert sorted(got) == [list(range(i, i + 12)) for i in range(0, 600, 12)]


def test_the_order_is_the_same_however_often_fairseq_asks() -> None:
    """Also of batches that cost the same: a resumed training has asked less often."""
    dataset = Pairs()
    dataset.src_sizes = dataset.tgt_sizes = np.full(600, 7)
    batches = [[i] for i in range(600)]
    iterator = EpochBatchIterator(dataset, dataset.collater, batches, num_shards=2, grouped_shuffling=True)
    for _ in range(2):
        balance_batches(iterator, rounded=False)
        assert iterator.frozen_batches == tuple(batches)


@pytest.mark.parametrize("how", [{"shards": 1}, {"grouped": False}])
def test_unsupported_settings_keep_fairseqs_order(how: dict[str, Any]) -> None:
    dataset = Pairs()
    assert epoch(dataset, 0, **how) == epoch(dataset, 0, wrapped=False, **how)


def test_costs_of_other_data_sets_are_their_numbers_of_tokens() -> None:
    dataset = Pairs()
    expected = epoch(dataset, 0)
    dataset.tgt_sizes, tgt_sizes = None, dataset.tgt_sizes
    dataset.num_tokens = lambda i: int(dataset.src_sizes[i] + 2 * tgt_sizes[i])  # type: ignore[method-assign]
    assert epoch(dataset, 0) == expected
