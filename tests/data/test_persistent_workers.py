"""Data workers are kept from epoch to epoch where fairseq restarts them."""

import os
from argparse import Namespace
from typing import Any

import numpy as np
import pytest
from fairseq.data import FairseqDataset
from fairseq.dataclass.configs import FairseqConfig
from fairseq.tasks import FairseqTask

from surface_fusion.data.persistent_workers import keep_data_workers

CFG = FairseqConfig()


class Numbers(FairseqDataset):
    """Sentences of random lengths; each item is its index and the process that read it."""

    def __init__(self) -> None:
        self.src_sizes = self.tgt_sizes = np.random.RandomState(0).randint(3, 60, 64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i, os.getpid()

    def num_tokens(self, i: int) -> int:
        return int(self.src_sizes[i])

    def size(self, i: int) -> int:
        return self.num_tokens(i)

    def collater(self, samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return samples


def iterator_of(task: FairseqTask, dataset: Any, epoch: int, workers: int = 1, **more: Any) -> Any:
    """An epoch's iterator as the trainer gets it, with ``--grouped-shuffling``."""
    settings = {"max_sentences": 4, "seed": epoch, "epoch": epoch, "num_workers": workers, **more}
    return task.get_batch_iterator(dataset, grouped_shuffling=True, update_epoch_batch_itr=True, **settings)


def epochs(keep: bool, dataset: Any, count: int = 3, workers: int = 1) -> list[list[Any]]:
    task, previous, found = FairseqTask(Namespace()), None, []
    for epoch in range(1, count + 1):
        iterator = iterator_of(task, dataset, epoch, workers, num_shards=2)
        if keep and previous is not None:
            keep_data_workers(previous, iterator, CFG)
        found.append(list(iterator.next_epoch_itr(shuffle=True)))
        previous = iterator
    return found


def processes_of(epoch: list[Any]) -> set[int]:
    return {process for batch in epoch for _, process in batch}


def test_workers_are_kept_and_batches_are_the_same() -> None:
    expected, found = epochs(False, Numbers(), workers=0), epochs(True, Numbers())
    numbers = [[[i for i, _ in batch] for batch in epoch] for epoch in found]
    assert numbers == [[[i for i, _ in batch] for batch in epoch] for epoch in expected]
    assert numbers[0] != numbers[1]
    processes = [processes_of(epoch) for epoch in found]
    assert len(processes[0]) == 1 and processes == [processes[0]] * 3


def test_batches_are_shuffled_again_after_a_curriculum_that_was_resumed() -> None:
    """The state of an epoch that was not shuffled; today's command line has no curriculum."""
    task, dataset = FairseqTask(Namespace()), Numbers()
    first = iterator_of(task, dataset, 1, seed=1)
    first.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": 2, "shuffle": False})
    in_order = [[i for i, _ in batch] for batch in first.next_epoch_itr()]
    second = iterator_of(task, dataset, 2, seed=1)
    keep_data_workers(first, second, CFG)
    batches = [[i for i, _ in batch] for batch in second.next_epoch_itr(shuffle=True)]
    expected = iterator_of(task, dataset, 2, seed=1)
    assert batches == [list(batch) for batch in expected.ordered_batches(2, False, True)]
    assert [batch for batch in batches if batch in in_order] != in_order


@pytest.mark.parametrize("change", ["same iterator", "other data"])
def test_unsupported_settings_use_fairseqs_workers(change: str) -> None:
    task, dataset = FairseqTask(Namespace()), Numbers()
    first = iterator_of(task, dataset, 1)
    list(first.next_epoch_itr())
    second = first if change == "same iterator" else iterator_of(task, Numbers(), 2)
    before = second.dataloader
    keep_data_workers(first, second, CFG)
    assert second.dataloader is before
