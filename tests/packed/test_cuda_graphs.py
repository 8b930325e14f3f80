"""Which captured graph a batch uses, and when another one is captured."""

from typing import Any

import pytest
import torch

from surface_fusion.packed import cuda_graphs as module
from surface_fusion.packed.batch import Capacity, capacity_for
from surface_fusion.packed.cuda_graphs import CAPTURE_COST, GraphCache
from tests.helpers.tiny import batch


class FakeStep:
    """Lists the methods that are called."""

    def __init__(
        self, forward: Any, flat: Any, padding_idx: int, capacity: Capacity, stream: Any, pool: Any
    ) -> None:
        self.capacity = capacity
        self.calls: list[str] = []

    def load(self, sample: dict[str, Any]) -> None:
        self.calls.append("load")

    def warm_up(self) -> None:
        self.calls.append("warm_up")

    def capture(self) -> None:
        self.calls.append("capture")

    def run(self, sample: dict[str, Any]) -> Any:
        return self


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> GraphCache:
    monkeypatch.setattr(module, "CapturedStep", FakeStep)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    return GraphCache(lambda batch: None, None, 1)  # type: ignore[arg-type, return-value]


def capacity(src: int, tgt: int = 100, padded: int = 100_000) -> Capacity:
    return Capacity(src, tgt, padded)


def test_each_size_is_captured_once_after_one_warm_up(graphs: GraphCache) -> None:
    first = graphs._select(capacity(1000), {})
    assert first.calls == ["load", "warm_up", "capture"]  # warm-up on real tokens
    assert graphs._select(capacity(1000), {}) is first
    second = graphs._select(capacity(2000), {})
    assert second.calls == ["capture"]
    assert graphs._select(capacity(1000), {}) is first


def test_a_batch_that_no_graph_covers_is_captured(graphs: GraphCache) -> None:
    large = graphs._select(capacity(1000), {})
    for needed in (capacity(1001), capacity(10, tgt=101), capacity(10, padded=100_001)):
        new = graphs._select(needed, {})
        assert new is not large and new.capacity == needed


def test_a_smaller_batch_uses_the_cheapest_graph_that_covers_it(graphs: GraphCache) -> None:
    captured = [graphs._select(capacity(src), {}) for src in (1000, 3000, 2000)]
    assert graphs._select(capacity(900), {}) is captured[0]
    assert graphs._select(capacity(1001), {}) is captured[2]


def test_a_graph_is_captured_when_the_excess_cost_exceeds_that_of_a_capture(graphs: GraphCache) -> None:
    large = graphs._select(capacity(40_000), {})
    small = capacity(10_000)
    below = -(-CAPTURE_COST // 30_000) - 1
    taken = []
    for _ in range(below + 5):
        taken.append(graphs._select(small, {}))
        graphs.capture_pending()
    assert taken[: below + 1] == [large] * (below + 1)
    assert {step.capacity for step in taken[below + 1 :]} == {small}
    assert len(graphs._captured) == 2
    # The excess starts at zero again, and a batch that fits exactly adds nothing.
    assert graphs._select(capacity(39_999), {}) is large
    for _ in range(20):
        assert graphs._select(capacity(40_000), {}) is large


def test_a_batch_that_fits_exactly_adds_no_excess_cost(graphs: GraphCache) -> None:
    exact = graphs._select(capacity(40_000), {})
    graphs._excess_cost = CAPTURE_COST
    assert graphs._select(capacity(40_000), {}) is exact
    graphs.capture_pending()
    assert graphs._captured == [exact]


def test_the_capacity_of_a_batch_follows_from_its_shape(graphs: GraphCache) -> None:
    sample = batch((50,) * 40, (30,) * 40)
    assert graphs.run(sample).capacity == capacity_for(40, 50, 30, 1200)
