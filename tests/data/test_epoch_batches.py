"""Batches made an epoch ahead are those that fairseq would have made."""

import copy
import os
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
import torch
from fairseq.data import FairseqDataset
from fairseq.tasks import FairseqTask

from surface_fusion import compat
from surface_fusion.data.epoch_batches import make_batches_ahead


class Sentences(FairseqDataset):
    """Of random lengths, in another order each time; knows by which process it was last ordered."""

    def __init__(self) -> None:
        self.sizes = np.random.RandomState(0).randint(3, 60, 60)
        self.ordered_here: list[int] = []
        self.process = os.getpid()
        self.epoch = 0

    def __len__(self) -> int:
        return len(self.sizes)

    def __getitem__(self, i: int) -> int:
        return i

    def num_tokens(self, i: int) -> int:
        return int(self.sizes[i])

    size = num_tokens

    def ordered_indices(self) -> Any:
        if os.getpid() == self.process:
            self.ordered_here.append(self.epoch)
        indices = np.random.permutation(len(self))
        return indices[np.argsort(self.sizes[indices] // 10, kind="stable")]

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch

    def collater(self, samples: list[int]) -> list[int]:
        return samples


HOW = {"max_sentences": 7, "seed": 3, "num_shards": 2, "num_workers": 2, "grouped_shuffling": True}


class Task(FairseqTask):
    def __init__(self, wrap: Any) -> None:
        super().__init__(Namespace())
        self.wrap = wrap

    def iterator(self, dataset: Any, epoch: int, **how: Any) -> Any:
        original = getattr(FairseqTask.get_batch_iterator, "__wrapped__", FairseqTask.get_batch_iterator)
        while hasattr(original, "__wrapped__"):
            original = original.__wrapped__
        how = {"update_epoch_batch_itr": True, **HOW, **how}
        return self.wrap(original, self, dataset, epoch=epoch, **how)


def theirs(make: Any, *args: Any, **kwargs: Any) -> Any:
    return make(*args, **kwargs)


def batches(iterator: Any) -> list[list[int]]:
    assert all(isinstance(batch, np.ndarray) for batch in iterator.frozen_batches)
    return [[int(i) for i in batch] for batch in iterator.frozen_batches]


def in_order(iterator: Any) -> list[list[int]]:
    iterator.num_workers = 0
    iterator.persistent_workers = False
    return [list(batch) for batch in iterator.next_epoch_itr(shuffle=True)]


@pytest.mark.parametrize("first", [1, 4])
def test_the_batches_are_fairseqs(first: int) -> None:
    plain, ahead = Sentences(), Sentences()
    one, other = Task(theirs), Task(make_batches_ahead)
    torch.manual_seed(5)
    for epoch in range(first, first + 5):
        expected, got = one.iterator(plain, epoch), other.iterator(ahead, epoch)
        assert batches(got) == batches(expected)
        assert ahead.epoch == got.epoch == epoch
        assert in_order(got) == in_order(expected)
        assert got.end_of_epoch() and got.next_epoch_idx == epoch + 1
    assert plain.ordered_here == [first + i for i in range(5)]
    assert ahead.ordered_here == [first, first + 1]  # the rest elsewhere


def test_torch_and_numpy_go_on_as_if_nothing_had_been() -> None:
    numbers = []
    for wrap in (theirs, make_batches_ahead):
        torch.manual_seed(5)
        np.random.seed(5)
        task, dataset = Task(wrap), Sentences()
        for epoch in (1, 2, 3):
            task.iterator(dataset, epoch)
        numbers.append((torch.rand(2).tolist(), np.random.rand(2).tolist()))
    assert numbers[0] == numbers[1]


@pytest.mark.parametrize(
    "change",
    [
        {"num_workers": 0},
        {"update_epoch_batch_itr": False, "disable_iterator_cache": True},
    ],
    ids=["no workers", "the same each epoch"],
)
def test_not_without_workers_or_need(change: dict[str, Any]) -> None:
    task, dataset = Task(make_batches_ahead), Sentences()
    for epoch in (1, 2, 3, 4):
        task.iterator(dataset, epoch, **change)
    assert dataset.ordered_here == [1, 2, 3, 4]


def test_not_for_data_that_changes() -> None:
    class Changing(Sentences):
        can_reuse_epoch_itr_across_epochs = property(lambda self: False)  # type: ignore[assignment]

    task, dataset = Task(make_batches_ahead), Changing()
    for epoch in (1, 2, 3, 4):
        task.iterator(dataset, epoch)
    assert dataset.ordered_here == [1, 2, 3, 4]


def test_what_was_not_expected_is_made_anew() -> None:
    task, dataset, other = Task(make_batches_ahead), Sentences(), Sentences()
    other.sizes = other.sizes[::-1].copy()
    for epoch in (1, 2, 3):
        task.iterator(dataset, epoch)
    for asked in ((dataset, 3, {}), (dataset, 7, {}), (other, 8, {}), (other, 9, {"seed": 4})):
        data, epoch, how = asked
        got = batches(task.iterator(data, epoch, **how))
        assert got == batches(Task(theirs).iterator(data, epoch, **how))


def test_a_task_can_be_copied_meanwhile() -> None:
    task, dataset = Task(make_batches_ahead), Sentences()
    for epoch in (1, 2, 3):
        task.iterator(dataset, epoch)
    copied = copy.deepcopy(task)
    expected = [batches(Task(theirs).iterator(dataset, epoch)) for epoch in (4, 5)]
    assert [batches(one.iterator(dataset, epoch)) for one, epoch in ((copied, 4), (copied, 5))] == expected
    assert batches(task.iterator(dataset, 4)) == expected[0]


def test_an_error_is_the_one_that_it_was() -> None:
    task, dataset = Task(make_batches_ahead), Sentences()
    task.iterator(dataset, 1)
    dataset.sizes = np.delete(dataset.sizes, slice(None))  # every sentence is gone
    with pytest.raises(Exception, match="need at least one array to concatenate"):
        for epoch in (2, 3):
            task.iterator(dataset, epoch)


def test_the_plugin_applies_it() -> None:
    compat.apply()
    assert FairseqTask.get_batch_iterator.__wrapped__.__wrapped__  # type: ignore[attr-defined]
