"""Capture CUDA graphs."""

import gc
from collections.abc import Callable
from typing import Any, TypeVar

import torch

Result = TypeVar("Result")


def capture(work: Callable[[], Result], stream: Any, pool: Any) -> tuple[torch.cuda.CUDAGraph, Result]:
    """Capture the kernels that *work* launches; return the graph and the result of *work*.

    The kernels do not run. Unlike ``torch.cuda.graph`` this neither collects garbage nor empties the
    allocator's cache, which takes seconds in a training. Garbage collection is disabled during the capture:
    freeing another model's graphs would invalidate it.

    Args:
        work: launches on the current stream without synchronising.
        stream: a side stream to capture on.
        pool: the graph's memory pool.

    Raises:
        RuntimeError: *work* ran an operation that cannot be captured.
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
