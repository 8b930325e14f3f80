"""Normalise and check the training flags; called by the architecture functions at the end of parsing."""

import importlib.util
import logging
from typing import Any

import torch
from fairseq.optim.lr_scheduler import LR_SCHEDULER_DATACLASS_REGISTRY

from surface_fusion.config.ranges import check_ranges
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def normalise_training_flags(args: Any) -> None:
    """Replace old names of flags and set derived ones, in place; only if *args* is a training command line.

    * ``--min-lr`` becomes ``--stop-min-lr``, unless the learning-rate scheduler has a flag of that name.
    * ``tpu``, which fairseq sets with ``--bf16`` (options.py, main of 2025), is unset without torch_xla.
    * ``flat_adam`` keeps its own fp32 weights, so fairseq's memory-efficient wrapper is used: it adds no
      second copy.

    Raises:
        SurfaceFusionError: a number is out of range, ``--fp16`` is given without a GPU, or flat_adam is
            combined with a flag that it does not support.
    """
    if not hasattr(args, "stop_min_lr") or hasattr(args, "_name"):
        return  # a model's configuration, not a command line
    check_ranges(vars(args))
    schedule = LR_SCHEDULER_DATACLASS_REGISTRY.get(args.lr_scheduler)
    if hasattr(args, "min_lr") and not hasattr(schedule, "min_lr"):
        logger.info(f"--min-lr {args.min_lr} is read as --stop-min-lr, fairseq's current name of the flag")
        args.stop_min_lr = args.min_lr
        del args.min_lr
    if args.bf16 and importlib.util.find_spec("torch_xla") is None:
        args.tpu = False
    if args.optimizer == "flat_adam":
        backend, noise = args.ddp_backend, getattr(args, "quant_noise_pq", 0)
        for is_set, flag in (
            (args.use_bmuf, "--use-bmuf"),
            (backend in ("slowmo", "fully_sharded"), f"--ddp-backend {backend}"),
            (noise > 0, f"--quant-noise-pq {noise}"),  # replaces parameters in each forward
        ):
            if is_set:
                raise SurfaceFusionError(
                    f"{flag} cannot be used with --optimizer flat_adam, which keeps parameters and gradients "
                    "in tensors of its own and averages them at each update; use --optimizer adam"
                )
        args.memory_efficient_fp16 = args.fp16
        args.memory_efficient_bf16 = args.bf16
    if args.fp16 and (args.cpu or not torch.cuda.is_available()):
        reason = "--cpu was given" if args.cpu else "none is visible"
        raise SurfaceFusionError(
            f"--fp16 needs a CUDA GPU and {reason}; leave --fp16 out to train on the CPU"
        )
