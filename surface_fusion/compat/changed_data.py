"""Data files that change while a training reads them."""

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from fairseq import checkpoint_utils, tasks
from fairseq.data import data_utils
from fairseq.trainer import Trainer

from surface_fusion.compat.patching import wrap
from surface_fusion.errors import SurfaceFusionError

Stamp = tuple[int, int, int]

_loaded: WeakKeyDictionary[Any, dict[str, Stamp]] = WeakKeyDictionary()
"""The files of each data set that is in use, as they were when it was loaded."""


def notice_changed_data() -> None:
    """End a training whose data files were removed or changed, when an epoch ends and a checkpoint is saved.

    fairseq maps the files and reads on from a removed one, so that a training ends with status 0 and cannot
    be repeated. A file that is truncated in place ends the process at once by the signal SIGBUS, if one of
    the lost pages is read before.
    """

    def load(original: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        dataset = original(path, *args, **kwargs)
        files = (f"{path}.{end}" for end in ("bin", "idx"))
        if dataset is not None:
            _loaded[dataset] = {file: _stamp(file) for file in files if os.path.isfile(file)}
        return dataset

    def lr_step(original: Callable[..., Any], trainer: Any, epoch: int, val_loss: Any = None) -> Any:
        check_data_files()
        return original(trainer, epoch, val_loss)

    def save(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        saved = original(*args, **kwargs)
        check_data_files()
        return saved

    def setup_task(original: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        _loaded.clear()  # of the last training in this process
        return original(*args, **kwargs)

    wrap(tasks, "setup_task", setup_task)
    wrap(data_utils, "load_indexed_dataset", load)
    wrap(Trainer, "lr_step", lr_step)  # each epoch
    wrap(checkpoint_utils, "save_checkpoint", save)  # also the last, after which there is no lr_step


def check_data_files() -> None:
    """Compare the files of all data sets in use with what they were.

    Raises:
        SurfaceFusionError: one is gone or is another.
    """
    for stamps in list(_loaded.values()):
        for file, stamp in stamps.items():
            what = "removed" if not os.path.exists(file) else "changed" if _stamp(file) != stamp else None
            if what is not None:
                raise SurfaceFusionError(
                    f"data file {file} was {what} while training; what was due to be saved is saved: put "
                    "the data back as it was and start again to go on"
                )


def _stamp(file: str) -> Stamp:
    found = os.stat(file)
    return found.st_ino, found.st_size, found.st_mtime_ns
