"""What the host does while the GPU works, rather than between two updates, when the GPU waits for it.

Between two updates (base model, 16,384 tokens, H200) the GPU had 2.5 of 27.5 ms nothing to do. A part of
that were two things that can be done at any time: the memory of the last batch was given back to the system
as soon as the next was asked for, and then, too, fairseq's thread took another batch from the data workers;
of two threads only one runs Python at a time.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

LONGEST = 0.1
"""Seconds after which a batch is fetched whether or not the GPU has work."""

_gpu_has_work = threading.Event()
_gpu_has_work.set()  # until somebody knows better
_held: list[Any] = []


def gpu_has_work() -> None:
    """To be called when much has been launched."""
    _gpu_has_work.set()


@contextmanager
def host_waits() -> Iterator[None]:
    """Around the wait of each update after which the GPU has nothing to do."""
    del _held[:-1]
    yield
    _gpu_has_work.clear()


def hold(samples: Any) -> None:
    """Keep a batch until the host waits in the update after, or another two have come."""
    _held.append(samples)
    del _held[:-2]


def fetch_while_waiting(create_consumer: Callable[[Any], None], buffered: Any) -> None:
    """fairseq's ``BufferedIterator._create_consumer``; its thread has time while the buffer is half full."""
    source = buffered._iterable
    buffered._iterable = _in_time(source, buffered._queue)
    create_consumer(buffered)
    buffered._iterable = source


def _in_time(source: Any, into: "Queue[Any]") -> Iterator[Any]:
    batches = iter(source)
    while True:
        if 2 * into.qsize() > into.maxsize:
            _gpu_has_work.wait(LONGEST)
        try:
            batch = next(batches)
        except StopIteration:
            return
        yield batch
        del batch  # else it lives for as long as the next is waited for
