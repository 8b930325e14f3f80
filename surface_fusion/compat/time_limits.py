"""Limit the time that processes wait for each other, and name those that are missing.

fairseq leaves torch's timeouts: 30 minutes with gloo, and an error that names no rank. Here the limit is
``--heartbeat-timeout`` seconds, by default 600.

``fairseq-hydra-train`` imports the package after the process group exists. From then on the limit holds
there, too, and the log names the rank that does not answer, but the error itself is torch's.
"""

import atexit
import functools
from datetime import timedelta
from typing import Any
from urllib.parse import urlparse

import torch.distributed as dist

from surface_fusion.compat import rank_watch
from surface_fusion.compat.patching import Original, repair, replaced
from surface_fusion.errors import SurfaceFusionError


def seconds_to_wait(distributed: Any) -> float:
    """The limit by the section ``distributed_training`` of a configuration, in seconds."""
    given = getattr(distributed, "heartbeat_timeout", -1)
    return float(given) if given > 0 else 600.0


@repair("fairseq.distributed.utils.call_main", probe="failing_rank_is_not_named")
def watch_main(call_main: Original, cfg: Any, main: Original, **kwargs: Any) -> None:
    """Name the rank that has stopped in the error of a process that waits for it."""
    call_main(cfg, rank_watch.WatchedMain(main), **kwargs)


@repair("fairseq.distributed.utils.distributed_init", probe="first_group_has_no_limit")
def limit_first_group(init: Original, cfg: Any) -> Any:
    """Limit the wait for a process that is missing or has stopped, and name it; fairseq waits 30 minutes."""
    given = getattr(cfg, "distributed_training", None)
    if given is None or dist.is_initialized() or cfg.common.tpu:
        return init(cfg)
    limited = functools.partial(_init_process_group, dist.init_process_group, seconds_to_wait(given))
    with replaced(dist, "init_process_group", limited):
        return init(cfg)


@repair("fairseq.checkpoint_utils.load_checkpoint", probe="first_group_has_no_limit")
def limit_existing_group(load: Original, cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Limit process groups older than the import of this package, as in ``fairseq-hydra-train``."""
    if rank_watch.running() is None and dist.is_available() and dist.is_initialized():
        wait = seconds_to_wait(getattr(trainer.cfg, "distributed_training", None))
        for group in dist.distributed_c10d._world.pg_map:
            dist.distributed_c10d._set_pg_timeout(timedelta(seconds=wait), group)
        watch = rank_watch.start(dist.distributed_c10d._get_default_store(), wait)
        atexit.register(watch.stop)  # a thread in the store must not see the interpreter end
    return load(cfg, trainer, *args, **kwargs)


@repair(
    "fairseq.distributed.utils.get_global_group",
    "fairseq.distributed.utils.new_groups",
    probe="further_groups_have_no_limit",
)
def limit_further_groups(new_groups: Original, *args: Any) -> Any:
    """Give further process groups the limit of the first."""
    watch = rank_watch.running()
    limit: dict[str, Any] = {} if watch is None else {"timeout": timedelta(seconds=watch.wait)}
    with replaced(dist, "new_group", functools.partial(dist.new_group, **limit)):
        return new_groups(*args)


def _init_process_group(
    init: Original, wait: float, backend: str, init_method: str, world_size: int, rank: int
) -> None:
    where: dict[str, Any] = {"init_method": init_method}
    if urlparse(init_method).scheme == "tcp" and rank is not None and rank >= 0:
        where = {"store": _wait_for_all_ranks(init_method, world_size, rank, wait)}
    init(backend=backend, world_size=world_size, rank=rank, timeout=timedelta(seconds=wait), **where)
    rank_watch.start(dist.distributed_c10d._get_default_store(), wait)


def _wait_for_all_ranks(init_method: str, world_size: int, rank: int, wait: float) -> Any:
    """The store of all processes, which have joined; an error names those missing after *wait* seconds."""
    place, limit = urlparse(init_method), timedelta(seconds=wait)
    advice = "start every rank, or raise --heartbeat-timeout"
    try:
        host, port = place.hostname or "localhost", place.port or 0
        store = dist.TCPStore(host, port, world_size, rank == 0, limit, wait_for_workers=False)
    except RuntimeError as error:
        fault = f"cannot listen at {init_method}: {error}"
        if rank > 0:
            fault = f"did not answer at {init_method} within {wait:g} s; {advice}"
        raise SurfaceFusionError(f"rank 0 {fault}") from error
    keys = [f"surface_fusion/joined/{other}" for other in range(world_size)]
    if store.add(keys[rank], 1) > 1:
        raise SurfaceFusionError(f"two processes joined {init_method} as rank {rank}; give each its own")
    try:
        store.wait(keys, limit)
    except RuntimeError as error:
        missing = [str(other) for other, key in enumerate(keys) if not store.check([key])]
        raise SurfaceFusionError(
            f"{world_size - len(missing)} of {world_size} processes joined {init_method} within {wait:g} s; "
            f"missing: rank {', '.join(missing)}; {advice}"
        ) from error
    return store
