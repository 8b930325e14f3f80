"""A process that waits for a missing or stopped one ends in time and names it."""

import os
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surface_fusion.compat import rank_watch, time_limits
from tests.helpers import warm_processes
from tests.helpers.two_processes import ADAM, FLAT, free_port, start


def rank_flags(rank: int, port: int, wait: int) -> tuple[object, ...]:
    meeting = ("--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-no-spawn")
    return (*meeting, "--distributed-rank", rank, "--heartbeat-timeout", wait)


def last_line(log: Path) -> str:
    return log.read_text().splitlines()[-1]


@pytest.mark.slow
@pytest.mark.parametrize("flags", [FLAT, ADAM, (*ADAM, "--sf-plain")], ids=["flat_adam", "adam", "plain"])
def test_a_stopped_rank_is_named_in_time(tmp_path: Path, flags: tuple[str, ...]) -> None:
    """0.1.0 waits for 1,800 s, and the fast path never sets fairseq's heartbeat."""
    logs, port = [tmp_path / f"{rank}.log" for rank in (0, 1)], free_port()
    ranks = [start(log, *flags, *rank_flags(i, port, 10)) for i, log in enumerate(logs)]
    try:
        until = time.monotonic() + 150
        while "num_updates=3" not in logs[0].read_text():
            assert time.monotonic() < until and ranks[0].exitcode is None, logs[0].read_text()[-3000:]
            time.sleep(0.2)
        assert ranks[1].pid is not None
        os.kill(ranks[1].pid, signal.SIGSTOP)
        assert warm_processes.wait(ranks[0], 120) == 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.join()
    assert "error: rank 1 of 2 does not answer" in last_line(logs[0])


@pytest.mark.slow
@pytest.mark.parametrize("rank", [0, 1])
def test_a_rank_that_never_joined_is_named_in_time(tmp_path: Path, rank: int) -> None:
    log, port = tmp_path / "log", free_port()
    assert warm_processes.wait(start(log, *FLAT, *rank_flags(rank, port, 3)), 150) == 2
    meeting = f"tcp://127.0.0.1:{port}"
    missing = f"1 of 2 processes joined {meeting} within 3 s; missing: rank 1"
    assert (f"rank 0 did not answer at {meeting} within 3 s" if rank else missing) in last_line(log)


def test_a_group_created_before_the_import_gets_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in fairseq-hydra-train, which imports the package after the process group exists."""
    at_exit: list[Any] = []
    monkeypatch.setattr(time_limits.atexit, "register", at_exit.append)
    monkeypatch.setattr(rank_watch, "_watch", None)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", world_size=1, rank=0)
    try:
        groups = [dist.group.WORLD, dist.new_group()]
        cfg = SimpleNamespace(distributed_training=SimpleNamespace(heartbeat_timeout=30))
        for _ in range(2):
            time_limits.limit_existing_group(lambda *_: None, None, SimpleNamespace(cfg=cfg))
        backends = [group._get_backend(torch.device("cpu")) for group in groups]
        assert [backend.options._timeout for backend in backends] == 2 * [timedelta(seconds=30)]
        assert rank_watch.running().wait == 30
        (stop,) = at_exit
        stop()
    finally:
        dist.destroy_process_group()


def test_the_limit_is_ten_minutes_or_the_heartbeat_timeout() -> None:
    assert time_limits.seconds_to_wait(SimpleNamespace(heartbeat_timeout=-1)) == 600
    assert time_limits.seconds_to_wait(SimpleNamespace(heartbeat_timeout=30)) == 30
