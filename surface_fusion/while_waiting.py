"""What the host does while the GPU works, rather than between two updates, when the GPU waits for it.

Between two updates (base model, 16,384 tokens, H200) the GPU had 2.5 of 27.5 ms nothing to do. A part of
that were two things that can be done at any time: the memory of the last batch was given back to the system
as soon as the next was asked for, and then, too, fairseq's thread took another batch from the data workers;
of two threads only one runs Python at a time.
"""

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from queue import Queue
from typing import Any

LONGEST = 0.1
"""Seconds, more than between two updates: who waits longer is not in a training, and need not wait at all."""

LOOK_AGAIN = 0.002
"""Seconds after which the thread looks whether the buffer is still half full."""

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


def forget() -> None:
    """Let go of the last training of this process."""
    _held.clear()
    _gpu_has_work.set()


def fetch_while_waiting(create_consumer: Callable[[Any], None], buffered: Any) -> None:
    """fairseq's ``BufferedIterator._create_consumer``; its thread has time while half the buffer is full."""
    source = buffered._iterable
    buffered._iterable = _InTime(source, buffered._queue)
    create_consumer(buffered)
    buffered._iterable = source


class _InTime:
    """The batches of *source*, which leave for the queue *into*."""

    def __init__(self, source: Any, into: "Queue[Any]") -> None:
        self.source, self.into = source, into

    def __iter__(self) -> Iterator[Any]:
        for batch in self.source:
            yield batch
            self._wait()

    def _wait(self) -> None:
        until = time.monotonic() + LONGEST
        while 2 * self.into.qsize() > self.into.maxsize and not _gpu_has_work.wait(LOOK_AGAIN):
            if time.monotonic() > until:
                _gpu_has_work.set()  # nobody trains
