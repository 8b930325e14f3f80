"""Batches are fetched while the GPU works, all of them and in order, and given back then."""

import time
import weakref
from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any

import pytest
from fairseq.data.iterators import BufferedIterator
from tiny import SHARED, batch, shaken

from surface_fusion import quick_trainer, while_waiting
from surface_fusion.early_sums import EarlySums
from surface_fusion.fast.flat import FlatParameters
from surface_fusion.fast.forward import PackedTransformer
from surface_fusion.fast.step import PackedStep


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
    monkeypatch.setattr(while_waiting, "LONGEST", 60.0)
    yield
    while_waiting.gpu_has_work()
    while_waiting._held.clear()


def wait() -> None:
    with while_waiting.host_waits():
        pass


def test_a_batch_is_fetched_when_the_gpu_has_work() -> None:
    source = Source(100)
    batches = BufferedIterator(4, source)
    assert next(batches) == 0
    assert source.settle() == 6  # four in the buffer, one in the thread's hands
    wait()
    assert next(batches) == 1
    assert source.settle() == 6  # the buffer is full again
    assert [next(batches) for _ in range(3)] == [2, 3, 4]
    assert source.settle() == 6
    while_waiting.gpu_has_work()
    assert source.settle() == 10
    wait()
    assert next(batches) == 5
    assert source.settle() == 10  # the thread has put down what it had, and waits
    while_waiting.gpu_has_work()
    assert list(batches) == list(range(6, 100))


def test_no_waiting_while_the_buffer_is_not_half_full() -> None:
    wait()
    source = Source(100)
    assert next(BufferedIterator(4, source)) == 0
    assert source.settle() in (3, 4)  # as the first was taken before or after the third came


def test_nothing_waits_forever(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whoever fetches faster than the thread is let, or never says that the GPU has work."""
    monkeypatch.setattr(while_waiting, "LONGEST", 0.01)
    for size in (1, 2, 10):
        wait()
        assert list(BufferedIterator(size, Source(30))) == list(range(30))


def test_errors_and_ends_arrive() -> None:
    batches = BufferedIterator(4, Source(2, ValueError("a broken file")))
    assert [next(batches), next(batches)] == [0, 1]
    with pytest.raises(ValueError, match="a broken file"):
        next(batches)
    shortened = BufferedIterator(4, Source(9)).take(3)
    assert list(shortened) == [0, 1, 2]


class Batch:
    """What a weak reference can point to."""


def test_the_last_batch_is_given_back_while_the_host_waits() -> None:
    alive: list[Any] = []
    for _ in range(3):
        samples = Batch()
        alive.append(weakref.ref(samples))
        while_waiting.hold(samples)
        before = [ref() is not None for ref in alive]
        wait()
        del samples
    assert before == [False, True, True]
    assert [ref() is not None for ref in alive] == [False, False, True]


def test_no_more_than_two_are_kept_where_nobody_waits() -> None:
    for i in range(5):
        while_waiting.hold(i)
    assert while_waiting._held == [3, 4]


@pytest.mark.parametrize(("cuda", "early", "held"), [(True, True, 1), (False, True, 0), (True, False, 0)])
def test_whose_batches_are_kept(cuda: bool, early: bool, held: int) -> None:
    criterion = SimpleNamespace(early_sums=EarlySums()) if early else None
    trainer = SimpleNamespace(cuda=cuda, get_criterion=lambda: criterion, _sync_stats=lambda: False)
    assert quick_trainer.announce_sums(lambda trainer, samples: "log", trainer, ["sample"]) == "log"
    assert len(while_waiting._held) == held


def test_the_step_says_when() -> None:
    model = shaken("--surfacefusion", "att", "--sf-gate", "0.8", SHARED)
    step = PackedStep(PackedTransformer(model, FlatParameters.of(model.parameters())), 0.1, 0)
    for run in (step.train, step.evaluate):
        wait()
        assert not while_waiting._gpu_has_work.is_set()
        run(batch())
        assert while_waiting._gpu_has_work.is_set()
