"""Keep imported packages from configuring the root logger."""

import contextlib
import logging
from collections.abc import Iterator


@contextlib.contextmanager
def root_logger_left_alone() -> Iterator[None]:
    """Prevent ``logging.basicConfig``, which fairseq calls on import, from taking effect in the block."""
    # logging.basicConfig does nothing if there is a handler.
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
