"""Name the rank that has stopped when a collective operation of several processes fails."""

import contextlib
import logging
import re
import threading
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)

COMMUNICATION = re.compile(r"gloo|nccl|timed out|timeout|connection|broken pipe", re.IGNORECASE)
"""Matches the messages of torch's errors of collective operations."""

TIMEOUT = re.compile(
    r"(gloo|nccl|store).*(timed out|timeout)|(timed out|timeout).*(gloo|nccl|store)", re.I | re.S
)
"""Matches those of them that are timeouts."""


class Watch:
    """Find the processes that have stopped: each counts upwards in the store, in a thread of its own.

    Args:
        store: of all processes; that of rank 0 holds it.
        rank, world_size: of this process, and how many there are.
        wait: seconds after which a collective operation fails.
    """

    def __init__(self, store: Any, rank: int, world_size: int, wait: float) -> None:
        self.wait = wait
        self.every = min(wait / 10, 5.0) * max(1.0, world_size / 16)
        self._store = dist.PrefixStore("surface_fusion/alive", store)
        self._rank = rank
        now = time.monotonic()
        self._seen = {other: (0, now) for other in range(world_size) if other != rank}
        self._answered = now
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        reported = False
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
            while not self._stopped.wait(self.every):
                self._store.add(str(self._rank), 1)
                for other, (before, _) in self._seen.items():
                    count = self._store.add(str(other), 0)
                    if count != before:
                        self._seen[other] = count, time.monotonic()
                self._answered = time.monotonic()
                if (silent := self.silent_ranks(8)) and not reported:
                    reported = True
                    logger.error(self.error_line(silent))

    def silent_ranks(self, intervals: float = 3) -> list[int]:
        """Ranks that have not counted for *intervals* intervals."""
        limit = time.monotonic() - intervals * self.every
        if self._answered < limit and self._rank != 0:
            return [0]
        return [other for other, (_, seen) in self._seen.items() if seen < limit]

    def wait_for_silent(self) -> list[int]:
        """:meth:`silent_ranks`, after long enough to notice a process that has just stopped."""
        until = time.monotonic() + 5 * self.every
        while not self.silent_ranks() and time.monotonic() < until:
            time.sleep(self.every / 4)
        return self.silent_ranks()

    def error_line(self, ranks: list[int]) -> str:
        """The error for silent *ranks*."""
        names = ", ".join(map(str, ranks))
        return (
            f"rank {names} of {len(self._seen) + 1} does not answer: its process was stopped, hangs or "
            f"ended; the others wait {self.wait:g} s for it, see --heartbeat-timeout"
        )

    def timeout_line(self) -> str:
        """The error for a timeout while all ranks count."""
        return (
            f"the {len(self._seen) + 1} processes waited {self.wait:g} s for one of them, which runs but did "
            "not exchange its results; if it is only slow, raise --heartbeat-timeout"
        )

    def stop(self) -> None:
        """End the thread, unless it waits for the store."""
        self._stopped.set()
        self._thread.join(timeout=2 * self.every)


_watch: Watch | None = None
"""The watch of this process's process group."""


def start(store: Any, wait: float) -> Watch:
    """Watch the process group of this process; see :class:`Watch`."""
    global _watch
    _watch = Watch(store, dist.get_rank(), dist.get_world_size(), wait)
    return _watch


def running() -> Watch | None:
    """The watch of this process's process group, or None."""
    return _watch


class WatchedMain:
    """A ``main`` of fairseq whose failing collective operations name the rank that caused the failure.

    Picklable: a spawned process imports this package with it, before it joins the process group.
    """

    def __init__(self, main: Callable[..., None]) -> None:
        self.main = main

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Call *main*, name the rank because of which a collective operation failed, and stop the watch."""
        global _watch
        try:
            self.main(*args, **kwargs)
        except (RuntimeError, KeyboardInterrupt) as error:
            interrupted = isinstance(error, KeyboardInterrupt)  # also by fairseq's heartbeat
            if _watch is None or not (interrupted or COMMUNICATION.search(str(error))):
                raise
            if silent := _watch.silent_ranks() if interrupted else _watch.wait_for_silent():
                raise SurfaceFusionError(_watch.error_line(silent)) from error
            if not interrupted and TIMEOUT.search(str(error)):
                raise SurfaceFusionError(_watch.timeout_line()) from error
            raise
        finally:
            if _watch is not None:
                _watch.stop()
                _watch = None
