"""Captured graphs can be replayed, and no garbage is collected during a capture."""

import gc
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surface_fusion.ops.cuda_graph import capture


@pytest.fixture
def without_gpu(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replace torch.cuda's graphs by stubs; return the list of calls."""
    called: list[str] = []
    graph = SimpleNamespace(
        capture_begin=lambda **_: called.append("begin"), capture_end=lambda: called.append("end")
    )
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: graph)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    return called


STREAM: Any = SimpleNamespace(device="cuda", wait_stream=lambda _: None)


@pytest.mark.parametrize("collecting", [True, False])
def test_no_garbage_is_collected_during_a_capture(without_gpu: list[str], collecting: bool) -> None:
    (gc.enable if collecting else gc.disable)()
    try:
        _, result = capture(gc.isenabled, STREAM, None)
        assert result is False and without_gpu == ["begin", "end"]
        assert gc.isenabled() is collecting
        with pytest.raises(ZeroDivisionError):
            capture(lambda: 1 / 0, STREAM, None)
        assert gc.isenabled() is collecting and without_gpu == ["begin", "end"] * 2
    finally:
        gc.enable()


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_a_graph_is_replayed() -> None:
    x = torch.ones(3, device="cuda")
    torch.mul(x, 2)
    graph, y = capture(lambda: x * 2, torch.cuda.Stream(), torch.cuda.graph_pool_handle())
    x.fill_(5)
    graph.replay()
    assert y.tolist() == [10, 10, 10]
