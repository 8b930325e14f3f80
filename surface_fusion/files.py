"""Write files so that each is whole or not there.

A file is written beside its target, under a name that was not there before, and then renamed. A process that
is killed leaves at most that temporary file; :func:`remove_abandoned` removes it.
"""

import contextlib
import errno
import fcntl
import io
import os
import re
import secrets
import stat
from collections.abc import Iterator
from typing import BinaryIO, Optional, Union

from surface_fusion.errors import SurfaceFusionError

PathLike = Union[str, "os.PathLike[str]"]

TEMPORARY = re.compile(r"\.(.*)\.[0-9a-f]{16}\.tmp")
"""The name of a temporary file; the group is (the beginning of) its target's."""

FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
"""Numbers of errors that only writing has."""

_ADVICE = {
    errno.ENOSPC: "free space, or write to another place",
    errno.EDQUOT: "free space, or write to another place",
    errno.EFBIG: "raise the limit on the size of files (ulimit -f)",
    errno.EACCES: "write to a folder that you may write to",
    errno.EPERM: "write to a folder that you may write to",
    errno.EROFS: "write to a folder that you may write to",
    errno.ENOENT: "its folder does not exist",
}


class WriteError(SurfaceFusionError):
    """A file cannot be written.

    Attributes:
        passing: whether another attempt may succeed, as after an error of a network's file system.
    """

    def __init__(self, path: PathLike, error: OSError) -> None:
        advice = _ADVICE.get(error.errno or 0, "write to another place")
        super().__init__(f"cannot write {os.fspath(path)}: {error.strerror or error}; {advice}")
        self.passing = error.errno in (errno.EIO, errno.ESTALE, errno.ETIMEDOUT, errno.EAGAIN)


@contextlib.contextmanager
def atomic_write(path: PathLike) -> Iterator[BinaryIO]:
    """A new binary file that replaces *path* when the block ends, and is removed if the block fails.

    The new file has the permissions of the one that it replaces, otherwise those that ``open`` gives. Where
    *path* is a link, the link is replaced; the file that it points to stays as it is.

    Raises:
        SurfaceFusionError: the file cannot be written (:class:`WriteError`), or *path* is a folder or device.
    """
    if os.path.exists(path) and not os.path.isfile(path):
        raise SurfaceFusionError(f"{path} is no file that could be written over; give another name")
    try:
        raw, beside = _create_beside(os.fspath(path))
    except OSError as error:
        raise WriteError(path, error) from error
    try:
        with io.BufferedWriter(raw, 1 << 20) as file:
            yield file
            with contextlib.suppress(OSError):
                os.fchmod(raw.fileno(), stat.S_IMODE(os.stat(path).st_mode))
            file.flush()
            with raw.recorded():
                os.replace(beside, path)
    except BaseException as error:
        with contextlib.suppress(OSError):
            os.remove(beside)
        failure = raw.failure
        if failure is None and isinstance(error, OSError) and error.errno in FULL:
            failure = error
        if failure is not None:
            raise WriteError(path, failure) from failure
        raise


def write_text(path: PathLike, text: str) -> None:
    """Write *text* as UTF-8 by :func:`atomic_write`."""
    with atomic_write(path) as file:
        file.write(text.encode("utf-8"))


def remove_abandoned(folder: PathLike) -> None:
    """Remove the temporary files in *folder* that no process writes any more."""
    for name in os.listdir(folder):
        if TEMPORARY.fullmatch(name) is None:
            continue
        path = os.path.join(folder, name)
        with contextlib.suppress(OSError):
            descriptor = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)  # its writer holds it
                os.remove(path)
            finally:
                os.close(descriptor)


class _File(io.FileIO):
    """A file that remembers its first error: torch replaces it by one that says nothing."""

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
        with self.recorded():  # a network's file system reports here that it is full
            super().close()


def _create_beside(path: str) -> tuple[_File, str]:
    """A new, locked file in the folder of *path*, and its name."""
    folder, name = os.path.split(path)
    while True:
        # Of the name, as much as fits in a name with the rest.
        beside = os.path.join(folder, f".{name[:40]}.{secrets.token_hex(8)}.tmp")
        try:
            # O_EXCL: not through a link, and not over a file, that is already there.
            descriptor = os.open(beside, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        except FileExistsError:
            continue
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        if os.fstat(descriptor).st_nlink:
            return _File(descriptor, "wb"), beside
        os.close(descriptor)  # removed as abandoned, before it was locked
