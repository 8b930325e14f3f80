"""Two gloo processes: they start without GPUs, and the one that waits for the other ends and names it."""

import os
import signal
import socket
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surface_fusion import SurfaceFusionError
from surface_fusion.compat import distributed
from tests.helpers.paths import REFERENCE
from tests.helpers.small_training import SIZES

DATA = REFERENCE / "data-bin"
FLAT = ("--optimizer", "flat_adam", "--criterion", "fused_label_smoothed_cross_entropy")
ADAM = ("--optimizer", "adam")
TRAIN = (
    *(DATA, *SIZES[:-5], "--encoder-attention-heads", 2, "--decoder-attention-heads", 2),
    *("--surfacefusion", "att", "--sf-gate", 0.8, "--lr", 0.005, "--max-tokens", 400, "--num-workers", 0),
    *("--cpu", "--log-format", "simple", "--log-interval", 1, "--no-save", "--disable-validation"),
    *("--distributed-world-size", 2, "--max-epoch", 500),
)


def start(log: Path, *flags: object) -> subprocess.Popen[str]:
    command = [sys.executable, "-u", "-m", "surface_fusion", "train", *map(str, (*TRAIN, *flags))]
    return subprocess.Popen(command, stdout=log.open("w"), stderr=subprocess.STDOUT, text=True)


def status(process: subprocess.Popen[str], timeout: float) -> int:
    """Its exit status, within *timeout* seconds; it is not left running."""
    try:
        return process.wait(timeout=timeout)
    finally:
        process.kill()
        process.wait()


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])


def rank_flags(rank: int, port: int, wait: int) -> tuple[object, ...]:
    meeting = ("--distributed-init-method", f"tcp://127.0.0.1:{port}", "--distributed-no-spawn")
    return (*meeting, "--distributed-rank", rank, "--heartbeat-timeout", wait)


def last_line(log: Path) -> str:
    return log.read_text().splitlines()[-1]


@pytest.mark.parametrize("way", [FLAT, ADAM, (*ADAM, "--sf-plain")], ids=["flat_adam", "adam", "plain"])
def test_a_stopped_rank_is_named_in_time(tmp_path: Path, way: tuple[str, ...]) -> None:
    """0.1.0 waits for 1,800 s, and the fast path never sets fairseq's heartbeat."""
    logs, port = [tmp_path / f"{rank}.log" for rank in (0, 1)], free_port()
    ranks = [start(log, *way, *rank_flags(i, port, 20)) for i, log in enumerate(logs)]
    try:
        until = time.monotonic() + 150
        while "num_updates=3" not in logs[0].read_text():
            assert time.monotonic() < until and ranks[0].poll() is None, logs[0].read_text()[-3000:]
            time.sleep(0.2)
        os.kill(ranks[1].pid, signal.SIGSTOP)
        assert ranks[0].wait(timeout=120) == 2
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()
    assert "error: rank 1 of 2 does not answer" in last_line(logs[0])


@pytest.mark.parametrize("came", [0, 1])
def test_a_rank_that_never_came_is_named_in_time(tmp_path: Path, came: int) -> None:
    log, port = tmp_path / "log", free_port()
    assert status(start(log, *FLAT, *rank_flags(came, port, 5)), timeout=150) == 2
    meeting = f"tcp://127.0.0.1:{port}"
    missing = f"1 of 2 processes came to {meeting} within 5 s; missing: rank 1"
    assert (f"rank 0 did not come to {meeting} within 5 s" if came else missing) in last_line(log)


def test_without_gpus_one_command_trains_all_ranks(tmp_path: Path) -> None:
    """0.1.0 starts a process for each GPU: none, status 0."""
    log, meeting = tmp_path / "log", ("--distributed-init-method", f"tcp://127.0.0.1:{free_port()}")
    assert status(start(log, *FLAT, *meeting, "--max-update", 2), timeout=200) == 0
    assert "starting 2 processes" in log.read_text() and "num_updates=2" in log.read_text()


def config(**given: Any) -> Any:
    section = {"distributed_world_size": 2, "distributed_rank": 0, "distributed_init_method": None}
    section |= {"distributed_no_spawn": False, "distributed_backend": "gloo", "distributed_port": -1, **given}
    common = SimpleNamespace(cpu=True, tpu=False)
    return SimpleNamespace(common=common, distributed_training=SimpleNamespace(**section))


@pytest.mark.skipif(torch.cuda.device_count() > 1, reason="there two processes have GPUs")
@pytest.mark.parametrize(
    ("given", "line"),
    [
        ({"distributed_rank": 1}, "--distributed-rank 1: without GPUs the command of rank 0 starts all 2"),
        ({"distributed_no_spawn": True}, "--distributed-no-spawn .* add --distributed-init-method tcp://"),
    ],
)
def test_what_cannot_start_says_so_in_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(SurfaceFusionError, match=line):
        distributed._call_on_cpus(lambda *_: pytest.fail("started"), config(**given), print)


def test_processes_of_torchrun_are_taken_as_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq divides by the number of GPUs."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "3", "RANK": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cfg = config(distributed_backend="nccl")
    distributed._call_on_cpus(lambda cfg, main: found.append(cfg.distributed_training), cfg, print)
    assert vars(found[0]) == {
        **vars(config(distributed_world_size=3, distributed_rank=1).distributed_training),
        **{"distributed_init_method": "env://", "distributed_no_spawn": True},
    }


@pytest.mark.parametrize(("port", "started"), [(9000, False), (-1, True)])
def test_slurm_is_fairseqs(monkeypatch: pytest.MonkeyPatch, port: int, started: bool) -> None:
    spawned: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setattr(torch.multiprocessing, "spawn", lambda *_, nprocs: spawned.append(nprocs))
    theirs: list[Any] = []
    distributed._call_on_cpus(lambda *_: theirs.append(1), config(distributed_port=port), print)
    assert (spawned, theirs) == (([2], []) if started else ([], [1]))


class Store:
    """What a watch calls of a store."""

    def __init__(self, *_: Any) -> None:
        pass

    def add(self, key: str, number: int) -> int:
        return 1


def test_a_rank_that_runs_but_is_stuck_is_told_with_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(distributed.dist, "PrefixStore", Store)
    monkeypatch.setattr(distributed.Watch, "wait_for_silent", lambda watch: [])
    timed_out = RuntimeError("[gloo/transport/tcp/unbound_buffer.cc:81] Timed out waiting 100ms for recv")

    def main() -> None:
        monkeypatch.setattr(distributed, "_watch", distributed.Watch(None, 0, 2, 0.1))
        raise timed_out

    with pytest.raises(SurfaceFusionError, match=r"2 processes waited 0\.1 s .* raise --heartbeat-timeout"):
        distributed._Watched(main)()
    timed_out = RuntimeError("DataLoader timed out after 5 seconds")
    with pytest.raises(RuntimeError, match="DataLoader timed out"):
        distributed._Watched(main)()


def test_a_group_that_is_older_than_the_import_gets_the_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    """As in fairseq-hydra-train, which imports the package after the processes have met."""
    at_exit: list[Any] = []
    monkeypatch.setattr(distributed.atexit, "register", at_exit.append)
    monkeypatch.setattr(distributed, "_watch", None)
    dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{free_port()}", world_size=1, rank=0)
    try:
        cfg = SimpleNamespace(distributed_training=SimpleNamespace(heartbeat_timeout=30))
        for _ in range(2):
            distributed._with_late_watch(lambda trainer, cfg: None, None, cfg)
        backend = dist.group.WORLD._get_backend(torch.device("cpu"))
        assert backend.options._timeout == timedelta(seconds=30) and distributed._watch.wait == 30
        (stop,) = at_exit
        stop()
    finally:
        dist.destroy_process_group()


def test_the_limit_is_ten_minutes_or_the_heartbeats() -> None:
    assert distributed.seconds_to_wait(SimpleNamespace(heartbeat_timeout=-1)) == 600
    assert distributed.seconds_to_wait(SimpleNamespace(heartbeat_timeout=30)) == 30
