"""Values for flags that a user of ``surface-fusion train`` leaves out.

fairseq requires an optimizer, a learning rate and a batch size, and its other defaults (the criterion
``cross_entropy``, a constant learning rate) train a Transformer badly.
"""

import argparse
import logging
import shlex
from argparse import Namespace
from collections.abc import Collection, Sequence

from fairseq import options
from fairseq.models import ARCH_CONFIG_REGISTRY, ARCH_MODEL_REGISTRY
from fairseq.models.transformer import TransformerModelBase

logger = logging.getLogger(__name__)

FIXED_SCHEDULE_FLAGS = ("--force-anneal", "--lr-shrink")
"""Flags of ``--lr-scheduler fixed``, fairseq's default; a command that gives one keeps that schedule."""


def with_training_defaults(argv: Sequence[str]) -> list[str]:
    """Return *argv*, arguments of ``fairseq-train`` with ``--arch``, after the :func:`missing_flags`.

    Logs one line that names the flags added. A training that is not a translation by a Transformer is
    returned as it is.
    """
    parser = options.get_training_parser()
    parser.prog = "surface-fusion train"
    parser.add_argument("--encoder-embed-dim", type=int, default=argparse.SUPPRESS)
    args, _ = parser.parse_known_args(argv)
    if args.task != "translation" or not issubclass(ARCH_MODEL_REGISTRY[args.arch], TransformerModelBase):
        return list(argv)
    sizes = Namespace()
    if "encoder_embed_dim" in args:
        sizes.encoder_embed_dim = args.encoder_embed_dim
    ARCH_CONFIG_REGISTRY[args.arch](sizes)
    args.encoder_embed_dim = sizes.encoder_embed_dim
    missing = missing_flags(argv, args)
    if missing:
        logger.info(f"defaults for flags that were not given: {shlex.join(missing)}")
    return [*missing, *argv]


def missing_flags(argv: Sequence[str], args: Namespace) -> list[str]:
    """Return flags with values for those that *argv* does not have; a function of its arguments alone.

    Args:
        argv: arguments of a training, ``--flag value`` or ``--flag=value``.
        args: the parsed arguments, with ``encoder_embed_dim`` of the architecture.
    """
    given = {argument.split("=", 1)[0] for argument in argv}
    added: dict[str, str] = {}

    def add(flag: str, value: object, aliases: Collection[str] = ()) -> None:
        if given.isdisjoint((flag, *aliases)):
            added[flag] = str(value)

    add("--optimizer", "flat_adam")
    if added.get("--optimizer", args.optimizer) in ("flat_adam", "adam"):
        add("--adam-betas", "(0.9, 0.98)")
    add("--lr", f"{learning_rate(args.encoder_embed_dim):.4g}")
    if given.isdisjoint(FIXED_SCHEDULE_FLAGS) and len(args.lr or ()) < 2:
        add("--lr-scheduler", "inverse_sqrt")
    if added.get("--lr-scheduler", args.lr_scheduler) == "inverse_sqrt":
        warm_up = min(4000, max(1, args.max_update // 6)) if args.max_update > 0 else 4000
        add("--warmup-updates", warm_up)
        add("--warmup-init-lr", "1e-07")
    add("--clip-norm", "1.0")
    add("--criterion", "fused_label_smoothed_cross_entropy")
    if "--criterion" in added:
        add("--label-smoothing", "0.1")
    if given.isdisjoint(("--batch-size", "--max-sentences")):
        add("--max-tokens", "4096")
    return [argument for pair in added.items() for argument in pair]


def learning_rate(width: int) -> float:
    """Peak learning rate of ``inverse_sqrt`` for an encoder of *width*.

    It is 5e-4 from 512 on, and inversely proportional to a smaller width, up to 2e-3.
    """
    return 5e-4 * 512 / min(max(width, 128), 512)
