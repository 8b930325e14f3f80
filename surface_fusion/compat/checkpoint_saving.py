"""Save checkpoints atomically and report write errors in one line."""

import logging
import os
import resource
import shutil
import tempfile
import time
from typing import Any

import torch
from fairseq import checkpoint_utils
from fairseq.file_io import PathManager
from torch import Tensor

from surface_fusion.compat.patching import Original, repair, replaced
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.io.atomic_write import WriteError, atomic_write, remove_abandoned

logger = logging.getLogger(__name__)

ATTEMPTS = 3
"""Number of attempts to save, as in fairseq."""
PAUSE = 2.5
"""Seconds between two attempts, as in fairseq."""

MOMENTS = {"adam": 2, "flat_adam": 2, "adamax": 2, "adadelta": 2, "lamb": 2, "cpu_adam": 2, "adagrad": 1}
"""Number of fp32 state values per trained parameter (lower bound; 0 if not listed)."""


@repair("fairseq.checkpoint_utils.torch_persistent_save", probe="failed_save_leaves_file")
def save_atomically(save: Original, obj: Any, filename: Any, async_write: bool = False) -> None:
    """Save to a temporary file and rename it when it is complete; a failed attempt changes no file."""
    if async_write or not isinstance(filename, str) or not PathManager.supports_rename(filename):
        save(obj, filename, async_write=async_write)
        return
    for attempt in range(1, ATTEMPTS + 1):
        try:
            with atomic_write(filename) as file:
                torch.save(obj, file)
            return
        except WriteError as error:
            if not error.transient or attempt == ATTEMPTS:
                raise _stopped(error) from error
            logger.warning(f"{error}; attempt {attempt} of {ATTEMPTS}")
            time.sleep(PAUSE)


@repair("fairseq.file_io.PathManager.copy", probe="copy_is_in_place")
def copy_atomically(copy: Original, src_path: str, dst_path: str, overwrite: bool = False) -> Any:
    """Copy to a temporary file and rename it when it is complete; a failed copy breaks no checkpoint."""
    if not all(map(PathManager.supports_rename, (src_path, dst_path))):
        return copy(src_path, dst_path, overwrite=overwrite)
    try:
        with open(src_path, "rb") as source, atomic_write(dst_path) as target:
            shutil.copyfileobj(source, target, 1 << 20)
    except WriteError as error:
        raise _stopped(error) from error
    return dst_path


def _stopped(error: WriteError) -> SurfaceFusionError:
    return SurfaceFusionError(
        f"{error}; earlier checkpoints are intact; rerun the command to resume from the last one"
    )


@repair("fairseq.checkpoint_utils.verify_checkpoint_directory", probe="dummy_file_is_removed")
def check_folder(check: Original, save_dir: str) -> None:
    """Test ``--save-dir`` with an unnamed file; fairseq overwrites and removes the user's file "dummy".

    Also removes the temporary files of killed saves.
    """
    if not PathManager.supports_rename(save_dir):
        check(save_dir)
        return
    try:
        os.makedirs(save_dir, exist_ok=True)
        remove_abandoned(save_dir)
        with tempfile.TemporaryFile(dir=save_dir) as probe:
            probe.write(b"\0")
            probe.flush()
    except OSError as error:
        raise SurfaceFusionError(f"--save-dir {save_dir}: {WriteError(save_dir, error)}") from error


@repair("fairseq.checkpoint_utils.load_checkpoint", probe="lack_of_space_is_noticed_late")
def check_space(load: Original, cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Check before a training that its first checkpoints fit on the disk and in the limit on file sizes."""
    result = load(cfg, trainer, *args, **kwargs)
    if cfg.no_save or not trainer.should_save_checkpoint_on_current_rank or trainer.is_fsdp:
        return result
    weights, state = checkpoint_size(trainer)
    size = weights + state
    sizes = f"{_in_units(size)} (weights {_in_units(weights)}, optimizer state {_in_units(state)})"
    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    if limit != resource.RLIM_INFINITY and limit < size:
        raise SurfaceFusionError(
            f"a checkpoint of this training takes about {sizes}, but this process may write files of at "
            f"most {_in_units(limit)}; raise that limit (ulimit -f)"
        )
    if os.path.isdir(cfg.save_dir):
        disk, files = shutil.disk_usage(cfg.save_dir), _files_of_a_save(cfg, trainer)
        if disk.total > 0 and disk.free < files * size:  # some file systems report 0
            raise SurfaceFusionError(
                f"--save-dir {cfg.save_dir} has {_in_units(disk.free)} free, but the first save needs "
                f"{_in_units(files * size)}: {files} files of about {sizes}; free space, give another "
                "--save-dir, or write fewer files (--no-epoch-checkpoints, --no-save-optimizer-state)"
            )
    return result


def _files_of_a_save(cfg: Any, trainer: Any) -> int:
    """Number of files that the first save adds to the folder."""
    validates = not trainer.cfg.dataset.disable_validation
    new = [not cfg.no_epoch_checkpoints or cfg.save_interval_updates > 0]
    new += [validates and cfg.keep_best_checkpoints > 0]
    fixed = {"best": validates, "last": not cfg.no_last_checkpoints}
    names = [f"checkpoint_{name}{trainer.checkpoint_suffix}.pt" for name in fixed if fixed[name]]
    old = sum(os.path.exists(os.path.join(cfg.save_dir, name)) for name in names)
    return sum(new) + len(names) - old + bool(old)  # an old file remains until the new one is complete


@repair("fairseq.checkpoint_utils.save_checkpoint", probe="second_best_is_not_kept")
def keep_n_best(save: Original, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None) -> Any:
    """Save a worse value, too, while there are fewer than ``--keep-best-checkpoints``; fairseq does not."""
    if val_loss is None or cfg.keep_best_checkpoints <= 0:
        return save(cfg, trainer, epoch_itr, val_loss)
    find = checkpoint_utils.checkpoint_paths
    worst = f"_{'-' if cfg.maximize_best_checkpoint_metric else ''}inf{trainer.checkpoint_suffix}.pt"

    def find_worst(*args: Any, **kwargs: Any) -> list[str]:
        checkpoint_utils.checkpoint_paths = find  # later calls find the files to remove
        found = find(*args, **kwargs)
        return found if len(found) >= cfg.keep_best_checkpoints else [worst]

    with replaced(checkpoint_utils, "checkpoint_paths", find_worst):
        return save(cfg, trainer, epoch_itr, val_loss)


@repair("fairseq.checkpoint_utils.save_checkpoint", probe="update_that_ends_epoch_is_not_saved")
def save_interval_at_end_of_epoch(
    save: Original, cfg: Any, trainer: Any, epoch_itr: Any, val_loss: float | None
) -> Any:
    """Save an update of ``--save-interval-updates`` that ends an epoch, too; fairseq writes no file."""
    epoch, interval = epoch_itr.epoch, cfg.save_interval_updates
    due = interval > 0 and trainer.get_num_updates() % interval == 0 and epoch_itr.end_of_epoch()
    if not due or cfg.write_checkpoints_asynchronously:
        return save(cfg, trainer, epoch_itr, val_loss)

    def save_both(filename: str, extra_state: Any) -> Any:
        saved = trainer.save_checkpoint(filename, extra_state)
        if not cfg.no_epoch_checkpoints and epoch % cfg.save_interval == 0:
            name = f"checkpoint{epoch}{trainer.checkpoint_suffix}.pt"
            PathManager.copy(filename, os.path.join(cfg.save_dir, name), overwrite=True)
        return saved

    # As within an epoch, whose file is copied from that of the update.
    within = _Overridden(epoch_itr, end_of_epoch=lambda: False)
    return save(cfg, _Overridden(trainer, save_checkpoint=save_both), within, val_loss)


class _Overridden:
    """An object with some attributes overridden."""

    def __init__(self, original: Any, **attributes: Any) -> None:
        vars(self).update(attributes, _original=original)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._original, name)


def checkpoint_size(trainer: Any) -> tuple[int, int]:
    """Approximate sizes of the weights and of the optimizer state in a checkpoint of *trainer*, in bytes."""
    model = trainer.get_model()  # trainer.model would build the distributed wrapper, in this process alone
    tensors = [value for value in model.state_dict().values() if isinstance(value, Tensor)]
    if trainer.cuda:  # copying gives each tensor its own memory and converts half precision to fp32
        weights = sum(value.numel() * max(value.element_size(), 4) for value in tensors)
    else:
        weights = sum({value.data_ptr(): value.nbytes for value in tensors}.values())
    if trainer.cfg.ema.store_ema:
        weights *= 2
    if trainer.cfg.checkpoint.no_save_optimizer_state:
        return weights, 0
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    name = getattr(trainer.cfg.optimizer, "_name", None) or ""
    half = trainer.cfg.common.fp16 or trainer.cfg.common.bf16
    copies = int(name == "flat_adam" and half)  # of the weights in fp32
    return weights, 4 * (MOMENTS.get(name, 0) + copies) * trained


def _in_units(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.3g} {unit}"
        count /= 1000
    return f"{count:.3g} TB"
