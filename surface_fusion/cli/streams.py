"""Give up an output stream that cannot be written."""

import contextlib
import os
from typing import TextIO


def discard_output(stream: TextIO) -> None:
    """Discard what *stream* holds and will get; Python would try to write it again when it ends."""
    with contextlib.suppress(OSError):  # not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())
