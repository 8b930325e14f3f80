"""Resume from the newest intact checkpoint where the last one is damaged."""

import contextlib
import logging
import os
import re
from typing import Any

import torch
from fairseq import checkpoint_utils

from surface_fusion.compat.checkpoint_integrity import DamagedCheckpointError, NotFiniteError, uses_optimizer
from surface_fusion.compat.patching import Original, repair
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)

CHECKPOINT_NAME = re.compile(r"checkpoint(\d+|_\d+_\d+|_best|_last|\.best_.+_[-.\d]+)\.pt")
"""File names that a training writes; averages and copies have other names."""
LAST = "checkpoint_last.pt"
"""The default of ``--restore-file``."""


# Of the trainer: only there --restore-file and --reset-optimizer are known.
@repair("fairseq.trainer.Trainer.load_checkpoint", probe="damaged_last_checkpoint_is_fatal")
def load_newest_intact(
    load: Original, trainer: Any, filename: str, reset_optimizer: bool = False, *args: Any, **kwargs: Any
) -> Any:
    """Resume from the newest intact checkpoint if checkpoint_last.pt is damaged; fairseq fails.

    Only the default ``--restore-file`` is replaced.
    """
    cfg = trainer.cfg.checkpoint
    default = cfg.restore_file == LAST and filename == os.path.join(cfg.save_dir, LAST)
    if default and not os.path.exists(filename):
        _warn_of_others(cfg.save_dir)
    token = uses_optimizer.set(not reset_optimizer)
    try:
        return load(trainer, filename, reset_optimizer, *args, **kwargs)
    except DamagedCheckpointError as damage:  # raised before the trainer has changed or been sent anything
        if not default:
            raise
        intact = _newest_intact(cfg.save_dir, filename, damage)
        return load(trainer, intact, reset_optimizer, *args, **kwargs)
    finally:
        uses_optimizer.reset(token)


def _warn_of_others(folder: str) -> None:
    """Log a warning if a training starts from scratch in a folder with checkpoints; fairseq logs none."""
    others = _checkpoints_in(folder) if os.path.isdir(folder) else []
    if others:
        newest = max(others, key=os.path.getmtime)
        logger.warning(
            f"{folder} has no {LAST}: training starts from scratch and overwrites "
            f"checkpoints there; to resume, add --restore-file {newest}"
        )


def _checkpoints_in(folder: str) -> list[str]:
    paths = [os.path.join(folder, name) for name in os.listdir(folder) if CHECKPOINT_NAME.fullmatch(name)]
    return [*filter(os.path.isfile, paths)]


def _newest_intact(folder: str, damaged: str, damage: Exception) -> str:
    """The intact checkpoint in *folder* with the most updates."""
    others = [(_updates(path), os.path.getmtime(path), path) for path in _checkpoints_in(folder)]
    for updates, _, path in sorted((item for item in others if item[0] is not None), reverse=True):
        if path == damaged:
            continue
        try:
            with contextlib.suppress(NotFiniteError):  # raised again when the trainer loads it
                checkpoint_utils.load_checkpoint_to_cpu(path)
        except SurfaceFusionError as error:
            logger.warning(f"skipping {path}: {error}")
            continue
        logger.warning(f"{damage}; resuming from {path} ({updates} updates), the newest intact one")
        return path
    raise DamagedCheckpointError(
        f"{damage}; {folder} has no intact checkpoint to resume from; remove {damaged} to start from scratch"
    ) from damage


def _updates(path: str) -> int | None:
    """Number of updates of a checkpoint, without reading its tensors.

    None for averages, which cannot be resumed, and for unreadable files.
    """
    with contextlib.suppress(Exception):  # torch raises various exceptions on damaged files
        state = torch.load(path, map_location="cpu", mmap=True)
        if "averaged" not in state:
            return int(state["optimizer_history"][-1]["num_updates"])
    return None
