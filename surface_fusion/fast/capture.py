"""Recording a CUDA graph."""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def capture(work: Callable[[], Result], stream: Any, pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """The kernels that *work* launches as a graph, and what it returns; nothing is computed.

    Unlike ``torch.cuda.graph`` this does not collect garbage and empty the allocator's cache each time:
    seconds over all graphs. And none is collected in between: to free another model's graphs would end it.

    Args:
        work: launches on the current stream and waits for nothing.
        stream: a side stream to record on.
        pool: the graph's memory.

    Raises:
        RuntimeError: *work* did what cannot be recorded.
    """
    graph = torch.cuda.CUDAGraph()
    current = torch.cuda.current_stream(stream.device)
    stream.wait_stream(current)
    collecting = gc.isenabled()
    gc.disable()
    try:
        with torch.cuda.stream(stream):
            graph.capture_begin(pool=pool, capture_error_mode="thread_local")
            try:
                result = work()
            finally:
                graph.capture_end()
    finally:
        if collecting:
            gc.enable()
    current.wait_stream(stream)
    return graph, result
