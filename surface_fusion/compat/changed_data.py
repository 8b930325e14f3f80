"""End a training whose data files were removed or changed since it loaded them.

The files are checked when an epoch begins and after each save. A file that is truncated in place ends the
process at once by the signal SIGBUS, if one of the lost pages is read before that.
"""

import os
from collections.abc import Callable
from typing import Any
from weakref import WeakKeyDictionary

from surface_fusion.errors import SurfaceFusionError

Stamp = tuple[int, int, int]
"""Inode, size and time of the last change."""

_loaded: WeakKeyDictionary[Any, dict[str, Stamp]] = WeakKeyDictionary()
"""The files of each data set in use, as they were when it was loaded."""


def forget_files(setup_task: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``setup_task``; forgets the files of the previous training in this process."""
    _loaded.clear()
    return setup_task(*args, **kwargs)


def record_files(load_dataset: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``load_indexed_dataset``; records the state of the files that it maps."""
    dataset = load_dataset(path, *args, **kwargs)
    files = (f"{path}.{end}" for end in ("bin", "idx"))
    if dataset is not None:
        _loaded[dataset] = {file: _stamp(file) for file in files if os.path.isfile(file)}
    return dataset


def check_files_before_epoch(
    next_epoch_itr: Callable[..., Any], iterator: Any, shuffle: bool = True, **kwargs: Any
) -> Any:
    """fairseq's ``EpochBatchIterator.next_epoch_itr``; checks the data files before an epoch of training."""
    if shuffle:  # validation and generation never shuffle
        check_data_files()
    return next_epoch_itr(iterator, shuffle, **kwargs)


def check_files_after_save(save_checkpoint: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``save_checkpoint``, then checks the data files; also at the end of the training."""
    saved = save_checkpoint(*args, **kwargs)
    check_data_files()
    return saved


def check_data_files() -> None:
    """Compare the files of all data sets in use with their recorded state.

    Raises:
        SurfaceFusionError: a file is gone or has changed.
    """
    for stamps in list(_loaded.values()):
        for file, stamp in stamps.items():
            what = "removed" if not os.path.exists(file) else "changed" if _stamp(file) != stamp else None
            if what is not None:
                raise SurfaceFusionError(
                    f"data file {file} was {what} while training; all due checkpoints are saved: restore "
                    "the data and rerun the command to resume"
                )


def _stamp(file: str) -> Stamp:
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns
