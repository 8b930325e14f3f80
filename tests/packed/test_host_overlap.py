"""Batches are fetched while the GPU works, all of them and in order, and given back then."""

import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data.iterators import BufferedIterator

from surface_fusion.criterions.statistics import EarlySums
from surface_fusion.packed import host_overlap
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.step import PackedStep
from surface_fusion.packed.transformer import PackedTransformer
from tests.helpers.tiny import SHARED, batch, shaken


class Source:
    """So many batches; remembers how many were fetched."""

    def __init__(self, count: int, error: Exception | None = None) -> None:
        self.count, self.error, self.fetched = count, error, 0

    def __len__(self) -> int:
        return self.count + (self.error is not None)

    def __iter__(self) -> Iterator[int]:
        for i in range(self.count):
            self.fetched += 1
            yield i
        if self.error is not None:
            raise self.error

    def settle(self) -> int:
        """How many were fetched when no more are."""
        before = -1
        while before != self.fetched:
            before = self.fetched
            time.sleep(0.2)
        return before


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(host_overlap, "LONGEST", 60.0)
    host_overlap.gpu_has_work()  # whatever the last training left
    yield
    host_overlap.gpu_has_work()
    host_overlap._held.clear()


def wait() -> None:
    with host_overlap.host_waits():
        pass


def test_a_batch_is_fetched_when_the_gpu_has_work() -> None:
    source = Source(100)
    batches = BufferedIterator(4, source)
    batches.fast_training = True
    assert next(batches) == 0
    assert source.settle() == 6  # four in the buffer, one in the thread's hands
    wait()
    assert next(batches) == 1
    assert source.settle() == 6  # the buffer is full again
    host_overlap.gpu_has_work()
    assert source.settle() == 7
    wait()
    assert [next(batches), next(batches)] == [2, 3]
    assert source.settle() == 7  # three in the buffer
    assert [next(batches), next(batches), next(batches)] == [4, 5, 6]
    assert source.settle() == 10  # it was less than half full
    host_overlap.gpu_has_work()
    assert list(batches) == list(range(7, 100))


def test_where_nobody_trains_batches_come_as_they_are_wanted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host_overlap, "LONGEST", 0.01)
    for size in (1, 2, 10):
        wait()
        batches, start = BufferedIterator(size, Source(300)), time.monotonic()
        batches.fast_training = True
        for i in range(300):
            assert next(batches) == i
            time.sleep(0.001)
        assert time.monotonic() - start < 10
    wait()
    source = Source(30)
    batches = BufferedIterator(10, source)
    batches.fast_training = True
    assert next(batches) == 0
    assert source.settle() == 12 and host_overlap._gpu_has_work.is_set()


def test_several_batches_in_a_row() -> None:
    """As with ``--update-freq``: the thread sees that the buffer is empty before the GPU has work again."""
    batches = BufferedIterator(1, Source(40))
    batches.fast_training = True
    for i in range(0, 40, 8):
        wait()
        for j in range(8):
            assert next(batches) == i + j
            time.sleep(0.01)


def test_errors_and_ends_arrive() -> None:
    batches = BufferedIterator(4, Source(2, ValueError("a broken file")))
    batches.fast_training = True
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="a broken file"):
        next(batches)
    shortened = BufferedIterator(4, Source(9)).take(3)
    shortened.fast_training = True
    assert list(shortened) == [0, 1, 2]


def test_the_iterator_is_what_it_was() -> None:
    """fairseq shortens it later on, and what it is made of."""
    asked: list[int] = []
    source: Any = Source(9)
    source.take = asked.append
    batches = BufferedIterator(4, source)
    batches.fast_training = True
    assert next(batches) == 0
    batches.take(3)
    assert asked == [3]


class Batch:
    """What a weak reference can point to."""


def test_the_last_batch_is_given_back_while_the_host_waits() -> None:
    alive: list[Any] = []
    for _ in range(3):
        samples = Batch()
        alive.append(weakref.ref(samples))
        host_overlap.hold(samples)
        before = [ref() is not None for ref in alive]
        wait()
        del samples
    assert before == [False, True, True]
    assert [ref() is not None for ref in alive] == [False, False, True]


def test_no_batch_is_kept_by_the_thread() -> None:
    class Batches(Source):
        def __iter__(self) -> Iterator[Any]:
            return (Batch() for _ in range(self.count))

    iterator = BufferedIterator(4, Batches(3))
    iterator.fast_training = True
    alive = [weakref.ref(batch) for batch in iterator]
    iterator._consumer.join()
    assert [ref() for ref in alive] == [None] * 3


def test_no_more_than_two_are_kept_where_nobody_waits() -> None:
    for i in range(5):
        host_overlap.hold(i)
    assert host_overlap._held == [3, 4]


@pytest.mark.parametrize(("cuda", "early", "held"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_whose_batches_are_kept(cuda: bool, early: bool, held: int) -> None:
    criterion = SimpleNamespace(early_sums=EarlySums()) if early else None
    trainer = SimpleNamespace(cuda=cuda, get_criterion=lambda: criterion, _sync_stats=lambda: False)
    assert trainer.announce_sums(lambda trainer, samples: "log", trainer, ["sample"]) == "log"
    assert len(host_overlap._held) == held


def test_the_norm_is_what_the_host_waits_for() -> None:
    model = shaken("--surfacefusion", "att", "--sf-gate", "0.8", SHARED)
    flat: Any = FlatParameters.of(model.parameters())
    seen: list[bool] = []
    sent = SimpleNamespace(synchronize=lambda: seen.append(host_overlap._gpu_has_work.is_set()))
    flat._norm, flat.local_only = (torch.tensor(3.0), sent), True
    assert flat.norm_on_host() == 3
    assert seen == [True] and not host_overlap._gpu_has_work.is_set()


def test_the_step_says_when() -> None:
    model = shaken("--surfacefusion", "att", "--sf-gate", "0.8", SHARED)
    step = PackedStep(PackedTransformer(model, FlatParameters.of(model.parameters())), 0.1, 0)
    for run in (step.train, step.evaluate):
        wait()
        assert not host_overlap._gpu_has_work.is_set()
        run(batch())
        assert host_overlap._gpu_has_work.is_set()
