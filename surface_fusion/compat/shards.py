"""Support ``--num-shards`` and ``--shard-id`` in commands that evaluate a trained model on a data set."""

import argparse
import functools
import sys
from typing import Any

from surface_fusion.compat.batching import as_array
from surface_fusion.compat.patching import Original, arguments, repair, replaced
from surface_fusion.errors import SurfaceFusionError

_shard: tuple[int, int] | None = None
"""Number of shards, and index of the one that the running command evaluates; None for all sentences."""


@repair("fairseq_cli.generate.main", probe="generate_ignores_shards")
def generate_shard(main: Original, cfg: Any, *args: Any, **kwargs: Any) -> Any:
    """Let ``generate`` translate the sentences of one shard, as ``--num-shards`` and ``--shard-id`` say."""
    settings = cfg if isinstance(cfg, argparse.Namespace) else cfg.dataset
    return _run_on_shard(main, _checked(settings), cfg, *args, **kwargs)


@repair("fairseq.distributed.utils.call_main", probe="validate_ignores_shards")
def evaluate_shard(call_main: Original, cfg: Any, main: Original, **kwargs: Any) -> None:
    """Let ``validate`` and ``eval-lm`` evaluate the sentences of one shard; several processes share them."""
    if cfg.common_eval.path is not None:  # no training
        shard = _checked(cfg.dataset)
        if shard is not None:
            cfg.dataset.num_shards, cfg.dataset.shard_id = 1, 0  # otherwise eval-lm splits the shard again
            main = functools.partial(_run_on_shard, main, shard)
    call_main(cfg, main, **kwargs)


@repair("fairseq.data.data_utils.batch_by_size", probe="batches_are_split_into_shards")
def batch_shard(batch_by_size: Original, *args: Any, **kwargs: Any) -> Any:
    """Batch sentences I, I+N, I+2N, ... if a command runs on shard I of N; fairseq deals out batches."""
    given = arguments(batch_by_size, *args, **kwargs)
    if _shard is not None:
        shards, number = _shard
        indices, sizes = as_array(given["indices"]), given["num_tokens_vec"]
        if len(indices) <= number:
            raise SurfaceFusionError(
                f"--num-shards {shards} --shard-id {number}: the data has {len(indices)} sentences, so this "
                "shard is empty; give fewer shards"
            )
        given["indices"] = indices[number::shards]
        given["num_tokens_vec"] = None if sizes is None else sizes[number::shards]
    return batch_by_size(**given)


def refuse_shards(command: str) -> None:
    """Refuse ``--num-shards`` for a *command* that does not read a data set.

    Raises:
        SurfaceFusionError: ``--num-shards`` is greater than 1.
    """
    if _shard is not None:
        raise SurfaceFusionError(
            f"--num-shards {_shard[0]}: {command} translates each line; leave it out, or split the text"
        )


def _checked(settings: Any) -> tuple[int, int] | None:
    """The shard that *settings* choose; None for a single one, which has all sentences."""
    shards, number = settings.num_shards, settings.shard_id
    if not 0 <= number < shards:
        raise SurfaceFusionError(
            f"--num-shards {shards} --shard-id {number}: give --num-shards N of 1 or more and "
            "--shard-id from 0 to N - 1"
        )
    return (shards, number) if shards > 1 else None


def _run_on_shard(main: Original, shard: tuple[int, int] | None, *args: Any, **kwargs: Any) -> Any:
    with replaced(sys.modules[__name__], "_shard", shard):
        return main(*args, **kwargs)
