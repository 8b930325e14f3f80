"""Which recording a batch takes, and when another is made."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surface_fusion.packed import cuda_graphs as module
from surface_fusion.packed.batch import Capacity, capacity_for
from surface_fusion.packed.cuda_graphs import RECORDING_ROWS, Graphs
from tests.helpers.tiny import batch


class FakeRecording:
    """What a recording is told."""

    def __init__(self, step: Any, capacity: Capacity, stream: Any, pool: Any) -> None:
        self.capacity = capacity
        self.told: list[str] = []

    def load(self, sample: dict[str, Any]) -> None:
        self.told.append("load")

    def rehearse(self) -> None:
        self.told.append("rehearse")

    def record(self) -> None:
        self.told.append("record")

    def run(self, sample: dict[str, Any]) -> Any:
        return self


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    monkeypatch.setattr(module, "Recording", FakeRecording)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return Graphs(SimpleNamespace())


def capacity(src: int, tgt: int = 100, padded: int = 100_000) -> Capacity:
    return Capacity(src, tgt, padded)


def test_the_same_size_is_recorded_once_and_rehearsed_once(graphs: Graphs) -> None:
    first = graphs._recording_for(capacity(1000), {})
    assert first.told == ["load", "rehearse", "record"]  # rehearsed on real tokens
    assert graphs._recording_for(capacity(1000), {}) is first
    second = graphs._recording_for(capacity(2000), {})
    assert second.told == ["record"]
    assert graphs._recording_for(capacity(1000), {}) is first


def test_a_batch_that_nothing_holds_gets_a_recording(graphs: Graphs) -> None:
    large = graphs._recording_for(capacity(1000), {})
    for needed in (capacity(1001), capacity(10, tgt=101), capacity(10, padded=100_001)):
        made = graphs._recording_for(needed, {})
        assert made is not large and made.capacity == needed


def test_a_smaller_batch_takes_the_cheapest_that_holds_it(graphs: Graphs) -> None:
    made = [graphs._recording_for(capacity(src), {}) for src in (1000, 3000, 2000)]
    assert graphs._recording_for(capacity(900), {}) is made[0]
    assert graphs._recording_for(capacity(1001), {}) is made[2]


def test_a_recording_is_made_when_what_was_wasted_has_paid_for_it(graphs: Graphs) -> None:
    large = graphs._recording_for(capacity(40_000), {})
    small = capacity(10_000)
    unpaid = -(-RECORDING_ROWS // 30_000) - 1
    taken = []
    for _ in range(unpaid + 5):
        taken.append(graphs._recording_for(small, {}))
        graphs.record_pending()  # while the GPU works
    assert taken[: unpaid + 1] == [large] * (unpaid + 1)
    assert {r.capacity for r in taken[unpaid + 1 :]} == {small}
    assert len(graphs._recordings) == 2
    # Paid: the account starts anew, and a batch that fits exactly is never charged.
    assert graphs._recording_for(capacity(39_999), {}) is large
    for _ in range(20):
        assert graphs._recording_for(capacity(40_000), {}) is large


def test_a_batch_that_fits_exactly_never_pays(graphs: Graphs) -> None:
    exact = graphs._recording_for(capacity(40_000), {})
    graphs._wasted = RECORDING_ROWS
    assert graphs._recording_for(capacity(40_000), {}) is exact
    graphs.record_pending()
    assert graphs._recordings == [exact]


def test_what_a_batch_needs_is_read_off_its_shape(graphs: Graphs) -> None:
    sample = batch((50,) * 40, (30,) * 40)
    assert graphs.run(sample).capacity == capacity_for(40, 50, 30, 1200)
