"""Faults in training with several processes."""

import argparse
import os
import socket
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.modules import LayerDropModuleList
from omegaconf import OmegaConf
from torch import distributed

from tests.compat.probes.expect import error_of, fails, replaced


def _without_gpus() -> Any:
    return replaced(torch.cuda, "device_count", lambda: 0)


def cpu_processes_are_not_started() -> bool:
    return _spawned() == [0] and _torchrun_divides_by_zero()


def _spawned() -> list[int]:
    """Numbers of processes that fairseq starts for a world of two."""
    started: list[int] = []
    given = argparse.Namespace(distributed_init_method="tcp://localhost:9", distributed_no_spawn=False)
    given.distributed_world_size, given.distributed_rank = 2, 0
    spawn = replaced(torch.multiprocessing, "spawn", lambda fn, args, nprocs, join: started.append(nprocs))
    with _without_gpus(), spawn:
        distributed_utils.call_main(argparse.Namespace(distributed_training=given), print)
    return started


def _torchrun_divides_by_zero() -> bool:
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "9", "WORLD_SIZE": "2", "RANK": "1"}
    given = argparse.Namespace(distributed_init_method=None, tpu=False, pipeline_model_parallel=False)
    given.distributed_world_size = 2
    with replaced(os, "environ", {**os.environ, **place}), _without_gpus():
        return fails(distributed_utils.infer_init_method, given, error=ZeroDivisionError)


def _arguments_of_ddp(model: torch.nn.Module) -> dict[str, object]:
    """What torch's wrapper gets for *model* on the CPU with fairseq's defaults."""
    got: dict[str, object] = {}

    def ddp(**kwargs: object) -> None:
        got.update(kwargs)
        raise InterruptedError

    names = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view")
    args = argparse.Namespace(tpu=False, ddp_backend="pytorch_ddp", device_id=0, ddp_comm_hook="none")
    vars(args).update(dict.fromkeys(names, False))
    device = torch.device("cpu")
    with replaced(distributed_fairseq_model, "DistributedDataParallel", ddp):
        make = distributed_fairseq_model.DistributedFairseqModel
        fails(make, args, model, None, device, error=InterruptedError)
    return got


def ddp_gets_device_on_cpu() -> bool:
    return _arguments_of_ddp(torch.nn.Linear(1, 1))["device_ids"] == [0]


def ddp_finds_no_unused_parameters() -> bool:
    layers = LayerDropModuleList(0.2, [torch.nn.Linear(1, 1)])
    return _arguments_of_ddp(layers)["find_unused_parameters"] is False


def first_group_has_no_limit() -> bool:
    """torch's limit of half an hour, whatever ``--heartbeat-timeout`` says."""
    given = argparse.Namespace(distributed_backend="gloo", distributed_init_method="tcp://localhost:9")
    given.distributed_world_size, given.distributed_rank, given.heartbeat_timeout = 2, 0, 30
    cfg = OmegaConf.create({"common": {"tpu": False}, "distributed_training": vars(given)})
    limits: list[object] = []

    def init_process_group(**kwargs: object) -> None:
        limits.append(kwargs.get("timeout"))
        raise InterruptedError

    with replaced(distributed, "init_process_group", init_process_group):
        fails(distributed_utils.distributed_init, cfg, error=InterruptedError)
    return limits == [None]


def further_groups_have_no_limit() -> bool:
    calls: list[dict[str, Any]] = []

    def new_group(*args: Any, **kwargs: Any) -> None:
        calls.append(kwargs)

    with replaced(distributed, "new_group", new_group):
        distributed_utils.new_groups([[0]])
        with replaced(distributed, "is_initialized", lambda: True):
            distributed_utils.get_global_group()
    del distributed_utils.get_global_group._global_group
    return calls == [{}, {}]


def failing_rank_is_not_named() -> bool:
    """The second of two processes ends; the first one's error names no rank."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    process = os.fork()
    rank = int(process == 0)
    store = distributed.TCPStore("localhost", port, 2, rank == 0)
    distributed.init_process_group("gloo", store=store, world_size=2, rank=rank)
    if rank == 1:
        os._exit(0)
    os.waitpid(process, 0)
    cfg = OmegaConf.create({"common": {"tpu": False}, "distributed_training": {}})
    cfg.distributed_training.distributed_init_method = None
    with replaced(distributed_utils, "infer_init_method", lambda settings: None):
        error = error_of(distributed_utils.call_main, cfg, lambda cfg: distributed.all_reduce(torch.ones(1)))
    distributed.destroy_process_group()
    return isinstance(error, RuntimeError) and "rank 1" not in str(error)
