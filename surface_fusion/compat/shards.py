"""Support ``--num-shards`` and ``--shard-id`` in commands that evaluate a trained model on a data set."""

import argparse
import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Optional

import numpy as np

from surface_fusion.errors import SurfaceFusionError


class Shard(NamedTuple):
    """Shard *number*, counted from 0, of *shards*."""

    shards: int
    number: int


_shard: Optional[Shard] = None
"""What the running command evaluates; None for all sentences."""


def generate_shard(main: Callable[..., Any], cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``generate.main``, of the sentences of one shard."""
    settings = cfg if isinstance(cfg, argparse.Namespace) else cfg.dataset
    return _run_on_shard(main, _checked(settings), cfg, *args, **kwargs)


def evaluate_shard(
    call_main: Callable[..., None], cfg: Any, main: Callable[..., None], **kwargs: Any
) -> None:
    """fairseq's ``call_main``; runs the *main* of ``validate`` and ``eval-lm`` on the sentences of one shard.

    Several processes share the batches of the shard.
    """
    if cfg.common_eval.path is not None:  # no training
        shard = _checked(cfg.dataset)
        if shard.shards > 1:
            cfg.dataset.num_shards, cfg.dataset.shard_id = 1, 0  # otherwise eval-lm splits the shard again
            main = functools.partial(_run_on_shard, main, shard)
    call_main(cfg, main, **kwargs)


def batch_shard(
    batch_by_size: Callable[..., Any],
    indices: Any,
    num_tokens_fn: Any,
    num_tokens_vec: Any = None,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """fairseq's ``batch_by_size``, of sentences I, I+N, I+2N, ... if a command runs on shard I of N."""
    if _shard is not None:
        if not isinstance(indices, np.ndarray):
            indices = np.fromiter(indices, dtype=np.int64, count=-1)
        mine = slice(_shard.number, None, _shard.shards)
        if len(indices) <= _shard.number:
            raise SurfaceFusionError(
                f"--num-shards {_shard.shards} --shard-id {_shard.number}: the data has {len(indices)} "
                "sentences, so this shard is empty; give fewer shards"
            )
        indices = indices[mine]
        num_tokens_vec = None if num_tokens_vec is None else num_tokens_vec[mine]
    return batch_by_size(indices, num_tokens_fn, num_tokens_vec, *args, **kwargs)


def refuse_shards(command: str) -> None:
    """Refuse ``--num-shards`` for a *command* that does not read a data set.

    Raises:
        SurfaceFusionError: ``--num-shards`` is greater than 1.
    """
    if _shard is not None:
        raise SurfaceFusionError(
            f"--num-shards {_shard.shards}: {command} translates each line; leave it out, or split the text"
        )


def _checked(settings: Any) -> Shard:
    shard = Shard(settings.num_shards, settings.shard_id)
    if not 0 <= shard.number < shard.shards:
        raise SurfaceFusionError(
            f"--num-shards {shard.shards} --shard-id {shard.number}: give --num-shards N of 1 or more and "
            "--shard-id from 0 to N - 1"
        )
    return shard


def _run_on_shard(main: Callable[..., Any], shard: Shard, *args: Any, **kwargs: Any) -> Any:
    global _shard
    _shard = shard if shard.shards > 1 else None
    try:
        return main(*args, **kwargs)
    finally:
        _shard = None
