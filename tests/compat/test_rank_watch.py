"""The error of a failing collective operation names the cause."""

from typing import Any

import pytest

from surface_fusion import SurfaceFusionError
from surface_fusion.compat import rank_watch


class Store:
    """What a watch calls of a store."""

    def __init__(self, *_: Any) -> None:
        pass

    def add(self, key: str, number: int) -> int:
        return 1


def test_a_stuck_rank_is_reported_with_the_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rank_watch.dist, "PrefixStore", Store)
    monkeypatch.setattr(rank_watch.Watch, "wait_for_silent", lambda watch: [])
    timed_out = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 100ms for recv")

    def main() -> None:
        monkeypatch.setattr(rank_watch, "_watch", rank_watch.Watch(None, 0, 2, 0.1))
        raise timed_out

    with pytest.raises(SurfaceFusionError, match=r"2 processes waited 0\.1 s .* raise --heartbeat-timeout"):
        rank_watch.WatchedMain(main)()
    timed_out = RuntimeError("DataLoader timed out after 5 seconds")
    with pytest.raises(RuntimeError, match="DataLoader timed out"):
        rank_watch.WatchedMain(main)()
