"""Train with several processes on a machine without GPUs."""

import logging
import os
import socket
from typing import Any

import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.modules import LayerDropModuleList

from surface_fusion.compat.patching import Original, repair
from surface_fusion.compat.rank_watch import WatchedMain
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)

DDP = "fairseq.models.distributed_fairseq_model.DistributedDataParallel"

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
"""Environment variables that torchrun sets for each process."""

SLURM = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
"""Environment variables by which fairseq finds the other machines if ``--distributed-port`` is given."""


@repair("fairseq.distributed.utils.call_main", probe="cpu_processes_are_not_started")
def start_processes_on_cpus(call_main: Original, cfg: Any, main: Original, **kwargs: Any) -> None:
    """Start ``--distributed-world-size`` processes on the CPU without GPUs, where fairseq starts none.

    Neither ``--distributed-no-spawn`` nor ``--distributed-backend gloo`` nor ``--ddp-backend legacy_ddp`` is
    needed. Processes that torchrun has started are used as they are; fairseq divides by the number of GPUs.
    """
    given, devices = cfg.distributed_training, torch.cuda.device_count()
    world, no_address = given.distributed_world_size, given.distributed_init_method is None
    if world <= max(devices, 1) or cfg.common.tpu:
        return call_main(cfg, main, **kwargs)
    by_torchrun = no_address and all(name in os.environ for name in TORCHRUN)
    by_slurm = no_address and given.distributed_port > 0 and any(name in os.environ for name in SLURM)
    if by_torchrun and devices == 0:
        given.distributed_init_method, given.distributed_no_spawn = "env://", True
        given.distributed_world_size = int(os.environ["WORLD_SIZE"])
        given.distributed_rank = int(os.environ["RANK"])
    elif by_torchrun or by_slurm or (devices > 0 and not cfg.common.cpu):
        return call_main(cfg, main, **kwargs)  # fairseq starts one for each GPU, other machines the rest
    if given.distributed_backend == "nccl":
        logger.info("--distributed-backend nccl needs GPUs; taking gloo")
        given.distributed_backend = "gloo"
    if given.distributed_no_spawn:
        if given.distributed_init_method is None:
            raise SurfaceFusionError(
                f"--distributed-no-spawn with --distributed-world-size {world} needs an address; "
                "add --distributed-init-method tcp://HOST:PORT, the same for all"
            )
        return call_main(cfg, main, **kwargs)
    rank = given.distributed_rank
    if rank != 0:
        raise SurfaceFusionError(
            f"--distributed-rank {rank}: without GPUs the command of rank 0 starts all {world} processes; "
            "leave the flag out, or start each rank by itself with --distributed-no-spawn"
        )
    if given.distributed_init_method is None:
        with socket.create_server(("localhost", 0)) as free:
            given.distributed_init_method = f"tcp://localhost:{free.getsockname()[1]}"
    logger.info(f"starting {world} processes on this machine's CPU")
    given.distributed_rank = None  # each gets its own
    started = torch.multiprocessing.spawn(  # type: ignore[no-untyped-call, attr-defined, unused-ignore]
        distributed_utils.distributed_main,
        (WatchedMain(main), cfg, {**kwargs, "start_rank": 0}),
        nprocs=world,
        join=False,
    )
    try:
        while not started.join():
            pass
    except KeyboardInterrupt:  # of this process alone; it would wait for the others at its end
        for process in started.processes:
            process.terminate()
        raise
    return None


@repair(DDP, probe="ddp_gets_device_on_cpu")
def without_device_ids(ddp: Original, *args: Any, module: Any, **kwargs: Any) -> Any:
    """Give torch's ``DistributedDataParallel`` no device id for a model on the CPU, which it refuses."""
    if not any(parameter.is_cuda for parameter in module.parameters()):
        kwargs.update(device_ids=None, output_device=None)
    return ddp(*args, module=module, **kwargs)


@repair(DDP, probe="ddp_finds_no_unused_parameters")
def find_unused_parameters(ddp: Original, *args: Any, module: Any, **kwargs: Any) -> Any:
    """Find parameters without a gradient with ``--ddp-backend pytorch_ddp``, which fails on a dropped layer.

    An update leaves some out with LayerDrop and ``--no-cross-attention``; the search costs time.
    """
    drops = (isinstance(part, LayerDropModuleList) and part.p > 0 for part in module.modules())
    if any(drops) or getattr(getattr(module, "cfg", None), "no_cross_attention", False):
        kwargs["find_unused_parameters"] = True
    return ddp(*args, module=module, **kwargs)
