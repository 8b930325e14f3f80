"""End a training whose data files were removed or changed since it loaded them.

The files are checked when an epoch begins and after each save. A file that is truncated in place ends the
process at once by the signal SIGBUS, if one of the lost pages is read before that.
"""

import os
from typing import Any
from weakref import WeakKeyDictionary

from surface_fusion.compat.patching import Original, repair
from surface_fusion.errors import SurfaceFusionError

_loaded: WeakKeyDictionary[Any, dict[str, tuple[int, ...]]] = WeakKeyDictionary()
"""The files of each data set in use and what :func:`_stamp` returned for them when it was loaded."""


@repair("fairseq.tasks.setup_task", probe="removed_data_is_read")
def forget_files(setup_task: Original, *args: Any, **kwargs: Any) -> Any:
    """Forget the data files of the previous training in this process."""
    _loaded.clear()
    return setup_task(*args, **kwargs)


@repair("fairseq.data.data_utils.load_indexed_dataset", probe="removed_data_is_read")
def record_files(load_dataset: Original, path: str, *args: Any, **kwargs: Any) -> Any:
    """Record the state of the data files that are mapped."""
    dataset = load_dataset(path, *args, **kwargs)
    files = (f"{path}.{end}" for end in ("bin", "idx"))
    if dataset is not None:
        _loaded[dataset] = {file: _stamp(file) for file in files if os.path.isfile(file)}
    return dataset


@repair("fairseq.data.iterators.EpochBatchIterator.next_epoch_itr", probe="removed_data_is_read")
def check_files_before_epoch(next_epoch: Original, iterator: Any, shuffle: bool = True, **kwargs: Any) -> Any:
    """End a training whose data files were removed or changed, when an epoch begins."""
    if shuffle:  # validation and generation never shuffle
        check_data_files()
    return next_epoch(iterator, shuffle, **kwargs)


@repair("fairseq.checkpoint_utils.save_checkpoint", probe="removed_data_is_read")
def check_files_after_save(save_checkpoint: Original, *args: Any, **kwargs: Any) -> Any:
    """End a training whose data files were removed or changed, after a save; fairseq ends with status 0."""
    saved = save_checkpoint(*args, **kwargs)
    check_data_files()
    return saved


def check_data_files() -> None:
    """Compare the files of all data sets in use with their recorded state.

    Raises:
        SurfaceFusionError: a file is gone or has changed.
    """
    for file, stamp in [item for stamps in list(_loaded.values()) for item in stamps.items()]:
        what = "removed" if not os.path.exists(file) else "changed" if _stamp(file) != stamp else None
        if what is not None:
            raise SurfaceFusionError(
                f"data file {file} was {what} while training; all due checkpoints are saved: restore "
                "the data and rerun the command to resume"
            )


def _stamp(file: str) -> tuple[int, ...]:
    status = os.stat(file)
    return status.st_ino, status.st_size, status.st_mtime_ns
