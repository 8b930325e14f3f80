"""Several processes: how they start without GPUs, how long they wait for each other, and for whom."""

import atexit
import functools
import logging
import os
import re
import socket
import threading
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any, Optional
from urllib.parse import urlparse

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils
from fairseq.models import distributed_fairseq_model
from fairseq.trainer import Trainer

from surface_fusion.compat.patching import wrap
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)

WAIT = 600.0
"""Seconds that a process waits for the others unless ``--heartbeat-timeout`` gives another number."""

COMMUNICATION = re.compile(r"gloo|nccl|timed out|timeout|connection|broken pipe", re.IGNORECASE)
"""What errors of collective operations say, however torch phrases them."""

TIME_IS_UP = re.compile(
    r"(gloo|nccl|store).*(timed out|timeout)|(timed out|timeout).*(gloo|nccl|store)", re.I | re.S
)
"""What those of them say that come after the time limit."""

TORCHRUN = ("MASTER_ADDR", "MASTER_PORT", "WORLD_SIZE", "RANK")
"""What torchrun sets in the environment of each process."""

SLURM = ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
"""By one of these fairseq finds the other machines, if ``--distributed-port`` is given."""


def wait_for_each_other_in_time() -> None:
    """Let a process that waits for a stopped or missing one end, and name that one.

    fairseq leaves torch's timeouts: 30 minutes with gloo, and an error that names no rank. Here the limit is
    ``--heartbeat-timeout`` seconds, 600 where that is not given.

    ``fairseq-hydra-train`` imports the package after the processes have met. From then on the limit holds
    there, too, and the log names the rank that does not answer, but the error itself is torch's.
    """
    wrap(distributed_utils, "distributed_init", _init)
    wrap(distributed_utils, "get_global_group", _new_groups)
    wrap(distributed_utils, "new_groups", _new_groups)
    wrap(distributed_utils, "call_main", _call_main)
    wrap(Trainer, "__init__", _with_late_watch)


def start_processes_on_cpus() -> None:
    """Let ``--distributed-world-size`` train without GPUs: fairseq starts one process per GPU, which is none.

    Also without ``--distributed-no-spawn``, ``--distributed-backend gloo`` and ``--ddp-backend legacy_ddp``.
    The processes that torchrun has started are used as they are; fairseq divides by the number of GPUs.
    """
    wrap(distributed_utils, "call_main", _call_on_cpus)  # around the other: it decides what that gets
    wrap(distributed_fairseq_model, "DistributedDataParallel", _without_device_ids)


def seconds_to_wait(distributed: Any) -> float:
    """The limit that the section ``distributed_training`` of a configuration asks for."""
    given = getattr(distributed, "heartbeat_timeout", -1)
    return float(given) if given > 0 else WAIT


def _call_on_cpus(original: Callable[..., None], cfg: Any, main: Callable[..., None], **kwargs: Any) -> None:
    given, devices = cfg.distributed_training, torch.cuda.device_count()
    world = given.distributed_world_size
    if world <= max(devices, 1) or cfg.common.tpu:
        return original(cfg, main, **kwargs)
    if given.distributed_init_method is None:
        by_torchrun = all(name in os.environ for name in TORCHRUN)
        by_slurm = given.distributed_port > 0 and any(name in os.environ for name in SLURM)
        if by_torchrun and devices == 0:
            given.distributed_init_method, given.distributed_no_spawn = "env://", True
            given.distributed_world_size = int(os.environ["WORLD_SIZE"])
            given.distributed_rank = int(os.environ["RANK"])
        elif by_torchrun or by_slurm:
            return original(cfg, main, **kwargs)
    if devices > 0 and not cfg.common.cpu:
        return original(cfg, main, **kwargs)  # more processes than GPUs: other machines have the rest
    if given.distributed_backend == "nccl":
        logger.info("--distributed-backend nccl needs GPUs; taking gloo")
        given.distributed_backend = "gloo"
    if given.distributed_no_spawn:
        if given.distributed_init_method is None:
            raise SurfaceFusionError(
                f"--distributed-no-spawn with --distributed-world-size {world} needs a place to meet; "
                "add --distributed-init-method tcp://HOST:PORT, the same for all"
            )
        return original(cfg, main, **kwargs)
    rank = given.distributed_rank
    if rank != 0:
        raise SurfaceFusionError(
            f"--distributed-rank {rank}: without GPUs the command of rank 0 starts all {world} processes; "
            "leave the flag out, or start each rank by itself with --distributed-no-spawn"
        )
    if given.distributed_init_method is None:
        given.distributed_init_method = f"tcp://localhost:{_free_port()}"
    logger.info(f"starting {world} processes on this machine's CPU")
    given.distributed_rank = None  # each gets its own
    torch.multiprocessing.spawn(  # type: ignore[no-untyped-call, attr-defined, unused-ignore]
        distributed_utils.distributed_main, (_Watched(main), cfg, {**kwargs, "start_rank": 0}), nprocs=world
    )
    return None


def _without_device_ids(original: Callable[..., Any], *args: Any, module: Any, **kwargs: Any) -> Any:
    """torch's DistributedDataParallel, which refuses device ids of a model on the CPU."""
    if not any(parameter.is_cuda for parameter in module.parameters()):
        kwargs.update(device_ids=None, output_device=None)
    return original(*args, module=module, **kwargs)


def _free_port() -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        return int(free.getsockname()[1])


def _call_main(original: Callable[..., None], cfg: Any, main: Callable[..., None], **kwargs: Any) -> None:
    original(cfg, _Watched(main), **kwargs)


def _init(original: Callable[..., int], cfg: Any) -> int:
    given = getattr(cfg, "distributed_training", None)
    if given is None or dist.is_initialized() or cfg.common.tpu:
        return original(cfg)
    init_process_group, wait = dist.init_process_group, seconds_to_wait(given)
    dist.init_process_group = functools.partial(_init_process_group, init_process_group, wait)
    try:
        rank = original(cfg)
    finally:
        dist.init_process_group = init_process_group
    return rank


def _with_late_watch(
    original: Callable[..., None], trainer: Any, cfg: Any, *args: Any, **kwargs: Any
) -> None:
    """fairseq's ``Trainer.__init__``, in a process group that is older than the import of this package."""
    global _watch
    if _watch is None and dist.is_available() and dist.is_initialized():
        wait = seconds_to_wait(getattr(cfg, "distributed_training", None))
        dist.distributed_c10d._set_pg_timeout(timedelta(seconds=wait))
        _watch = Watch(
            dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size(), wait
        )
        atexit.register(_watch.stop)  # a thread in the store must not see the interpreter end
    original(trainer, cfg, *args, **kwargs)


def _new_groups(original: Callable[..., Any], *args: Any) -> Any:
    """What makes further groups, which do not have the limit of the first one by themselves."""
    if _watch is None:
        return original(*args)
    new_group = dist.new_group
    dist.new_group = functools.partial(new_group, timeout=timedelta(seconds=_watch.wait))
    try:
        return original(*args)
    finally:
        dist.new_group = new_group


def _init_process_group(
    original: Callable[..., None], wait: float, backend: str, init_method: str, world_size: int, rank: int
) -> None:
    global _watch
    limit = timedelta(seconds=wait)
    if urlparse(init_method).scheme == "tcp" and rank is not None and rank >= 0:
        store = _meet(init_method, world_size, rank, wait)
        original(backend=backend, store=store, world_size=world_size, rank=rank, timeout=limit)
    else:
        original(backend=backend, init_method=init_method, world_size=world_size, rank=rank, timeout=limit)
        store = dist.distributed_c10d._get_default_store()
    _watch = Watch(store, dist.get_rank(), dist.get_world_size(), wait)


def _meet(init_method: str, world_size: int, rank: int, wait: float) -> Any:
    """The store of all processes, when all have come to it.

    Raises:
        SurfaceFusionError: not all came in time.
    """
    place, limit = urlparse(init_method), timedelta(seconds=wait)
    advice = "start every rank, or raise --heartbeat-timeout"
    try:
        host, port = place.hostname or "localhost", place.port or 0
        store = dist.TCPStore(host, port, world_size, rank == 0, limit, wait_for_workers=False)
    except RuntimeError as error:
        if rank == 0:
            raise SurfaceFusionError(f"rank 0 cannot listen at {init_method}: {error}") from error
        raise SurfaceFusionError(
            f"rank 0 did not come to {init_method} within {wait:g} s; {advice}"
        ) from error
    keys = [f"surface_fusion/came/{other}" for other in range(world_size)]
    if store.add(keys[rank], 1) > 1:
        raise SurfaceFusionError(f"two processes came to {init_method} as rank {rank}; give each its own")
    try:
        store.wait(keys, limit)
    except RuntimeError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise SurfaceFusionError(
            f"{world_size - len(missing)} of {world_size} processes came to {init_method} within {wait:g} s; "
            f"missing: rank {', '.join(missing)}; {advice}"
        ) from error
    return store


class Watch:
    """Which processes show a sign of life: each counts upwards in the store, in a thread of its own.

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
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        said = False
        try:
            while not self._ended.wait(self.every):
                self._store.add(str(self._rank), 1)
                for other, (before, _) in self._seen.items():
                    count = self._store.add(str(other), 0)
                    if count != before:
                        self._seen[other] = count, time.monotonic()
                self._answered = time.monotonic()
                if self.silent(8) and not said:
                    said = True
                    logger.error(self.line(self.silent(8)))
        except RuntimeError:  # rank 0 has ended, and the store with it
            pass

    def silent(self, beats: float = 3) -> list[int]:
        """Ranks that have shown no sign of life for so many beats."""
        limit = time.monotonic() - beats * self.every
        if self._answered < limit and self._rank != 0:
            return [0]
        return [other for other, (_, seen) in self._seen.items() if seen < limit]

    def wait_for_silent(self) -> list[int]:
        """:meth:`silent`, after long enough to notice a process that has just stopped."""
        until = time.monotonic() + 5 * self.every
        while not self.silent() and time.monotonic() < until:
            time.sleep(self.every / 4)
        return self.silent()

    def line(self, ranks: list[int]) -> str:
        """What a user is told of silent *ranks*."""
        names = ", ".join(map(str, ranks))
        return (
            f"rank {names} of {len(self._seen) + 1} does not answer: its process was stopped, hangs or "
            f"ended; the others wait {self.wait:g} s for it, see --heartbeat-timeout"
        )

    def line_of_none(self) -> str:
        """What a user is told when the time is up and all ranks show signs of life."""
        return (
            f"the {len(self._seen) + 1} processes waited {self.wait:g} s for one of them, which runs but did "
            "not exchange its results; if it is only slow, raise --heartbeat-timeout"
        )

    def stop(self) -> None:
        """End the thread, if the store lets it."""
        self._ended.set()
        self._thread.join(timeout=2 * self.every)


_watch: Optional[Watch] = None
"""Of the process group that this process is in."""


class _Watched:
    """A ``main`` whose failing collective operations say which rank is to blame.

    Picklable: a spawned process imports this package with it, before it joins the others.
    """

    def __init__(self, main: Callable[..., None]) -> None:
        self.main = main

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        global _watch
        try:
            self.main(*args, **kwargs)
        except (RuntimeError, KeyboardInterrupt) as error:
            if _watch is None:
                raise
            interrupted = isinstance(error, KeyboardInterrupt)  # also by fairseq's heartbeat
            if not interrupted and not COMMUNICATION.search(str(error)):
                raise
            silent = _watch.silent() if interrupted else _watch.wait_for_silent()
            if silent:
                raise SurfaceFusionError(_watch.line(silent)) from error
            if not interrupted and TIME_IS_UP.search(str(error)):
                raise SurfaceFusionError(_watch.line_of_none()) from error
            raise
        finally:
            if _watch is not None:
                _watch.stop()
                _watch = None
