"""Several processes train on a machine without GPUs."""

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from surface_fusion import SurfaceFusionError
from surface_fusion.compat.cpu_processes import start_processes_on_cpus
from tests.helpers.two_processes import FLAT, TRAIN, free_port


@pytest.mark.slow
def test_one_command_starts_all_ranks_without_gpus() -> None:
    """0.1.0 starts a process for each GPU: none, status 0."""
    meeting = ("--distributed-init-method", f"tcp://127.0.0.1:{free_port()}", "--max-update", 2)
    command = [sys.executable, "-m", "surface_fusion", "train", *map(str, (*TRAIN, *FLAT, *meeting))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=200)
    assert done.returncode == 0, done.stderr
    assert "starting 2 processes" in done.stdout and "num_updates=2" in done.stdout


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
def test_impossible_settings_are_refused_in_one_line(given: dict[str, Any], line: str) -> None:
    with pytest.raises(SurfaceFusionError, match=line):
        start_processes_on_cpus(lambda *_: pytest.fail("started"), config(**given), print)


def test_processes_of_torchrun_are_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """fairseq divides by the number of GPUs."""
    found: list[Any] = []
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    environment = {"MASTER_ADDR": "localhost", "MASTER_PORT": "29500", "WORLD_SIZE": "3", "RANK": "1"}
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    cfg = config(distributed_backend="nccl")
    start_processes_on_cpus(lambda cfg, main: found.append(cfg.distributed_training), cfg, print)
    assert vars(found[0]) == {
        **vars(config(distributed_world_size=3, distributed_rank=1).distributed_training),
        **{"distributed_init_method": "env://", "distributed_no_spawn": True},
    }


@pytest.mark.parametrize(("port", "started"), [(9000, False), (-1, True)])
def test_slurm_jobs_are_started_by_fairseq(monkeypatch: pytest.MonkeyPatch, port: int, started: bool) -> None:
    spawned: list[Any] = []

    def spawn(*_: Any, nprocs: int, join: bool) -> Any:
        spawned.append(nprocs)
        return SimpleNamespace(join=lambda: True, processes=[])

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    monkeypatch.setenv("SLURM_JOB_NODELIST", "node[1-2]")
    monkeypatch.setattr(torch.multiprocessing, "spawn", spawn)
    theirs: list[Any] = []
    start_processes_on_cpus(lambda *_: theirs.append(1), config(distributed_port=port), print)
    assert (spawned, theirs) == (([2], []) if started else ([], [1]))
