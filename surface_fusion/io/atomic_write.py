"""Write files atomically.

A file is written to a temporary file in the folder of its target, which is then renamed. A killed process
leaves at most the temporary file, which :func:`remove_abandoned` removes. There is no ``fsync``: a completed
write survives a killed process, but not a power failure.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import shutil
import stat
from collections.abc import Iterator
from typing import BinaryIO, Optional, Union

from surface_fusion.errors import SurfaceFusionError

PathLike = Union[str, "os.PathLike[str]"]

TEMPORARY = re.compile(r"\.(.*)\.[0-9a-f]{16}\.tmp")
"""The name of a temporary file; the group is (the beginning of) the name of its target."""

NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""errno values that only a write can raise."""

_ADVICE = {
    **dict.fromkeys((errno.ENOSPC, errno.EDQUOT), "free space, or write to another disk"),
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    **dict.fromkeys((errno.EACCES, errno.EPERM, errno.EROFS), "write to a folder that you may write to"),
    errno.ENOENT: "create the folder first",
}


class WriteError(SurfaceFusionError):
    """A file cannot be written.

    Attributes:
        transient: whether another attempt may succeed, as after an error of a network file system.
    """

    def __init__(self, path: PathLike, error: OSError) -> None:
        advice = _ADVICE.get(error.errno or 0, "write to another path")
        super().__init__(f"cannot write {os.fspath(path)}: {error.strerror or error}; {advice}")
        self.transient = error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)


@contextlib.contextmanager
def atomic_write(path: PathLike) -> Iterator[BinaryIO]:
    """Open a new binary file that replaces *path* after the block, and is removed if the block fails.

    The new file has the permissions of the one that it replaces, otherwise those that ``open`` gives. If
    *path* is a link, the link is replaced; its target is unchanged.

    Raises:
        SurfaceFusionError: the file cannot be written (:class:`WriteError`), or *path* is a folder or device.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise SurfaceFusionError(f"{path} is not a regular file and cannot be overwritten; give another name")
    try:
        raw, temporary = _create_temporary(os.fspath(path))
    except OSError as error:
        raise WriteError(path, error) from error
    try:
        with io.BufferedWriter(raw, 1 << 20) as file:
            yield file
            with contextlib.suppress(OSError):
                os.fchmod(raw.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            file.flush()
            with raw.recorded():
                os.replace(temporary, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(temporary)
        no_space = error if isinstance(error, OSError) and error.errno in NO_SPACE else None
        failure = raw.failure or no_space
        if failure is not None:
            raise WriteError(path, failure) from failure
        raise


def write_text(path: PathLike, text: str) -> None:
    """Write *text* as UTF-8 by :func:`atomic_write`."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def create_folder(folder: PathLike, name: str) -> tuple[str, int]:
    """Create a temporary folder in *folder*; return its path and its lock, a descriptor to close later."""
    path = _temporary_path(os.fspath(folder), name)
    os.mkdir(path, 0o700)
    return path, _locked(os.open(path, os.O_RDONLY | os.O_CLOEXEC))


def remove_abandoned(folder: PathLike) -> None:
    """Remove the temporary files and folders in *folder* that no running process writes."""
    for name in os.listdir(folder):
        if TEMPORARY.fullmatch(name) is None:
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            access = os.O_RDONLY if os.path.isdir(path) else os.O_RDWR
            descriptor = os.open(path, access | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # fails while the writer has the lock
                shutil.rmtree(path) if os.path.isdir(path) else os.remove(path)
            finally:
                os.close(descriptor)


class _RecordingFile(io.FileIO):
    """Records the first OSError: torch.save replaces it by an exception without errno."""

    failure: Optional[OSError] = None

    @contextlib.contextmanager
    def recorded(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            self.failure = self.failure or error
            raise

    def write(self, data: object) -> int:  # type: ignore[override]
        with self.recorded():
            return super().write(data)  # type: ignore[arg-type]

    def close(self) -> None:
        with self.recorded():  # a network file system may report a full disk here
            super().close()


def _temporary_path(folder: str, name: str) -> str:
    # At most 40 characters of the name, so that the total length is valid.
    return os.path.join(folder, f".{name[:40]}.{secrets.token_hex(8)}.tmp")


def _locked(descriptor: int) -> int:
    with contextlib.suppress(OSError):  # the file system does not support locks
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    return descriptor


def _create_temporary(path: str) -> tuple[_RecordingFile, str]:
    """Create a locked file in the folder of *path*; return it and its path."""
    while True:
        temporary = _temporary_path(*os.path.split(path))
        try:
            # O_EXCL: fail if a file or link of this name exists.
            flags = os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            descriptor = _locked(os.open(temporary, flags, 0o666))
        except FileExistsError:
            continue
        if os.fstat(descriptor).st_nlink:
            return _RecordingFile(descriptor, "wb"), temporary
        os.close(descriptor)  # another process removed the file before it was locked
