"""Flags of the verbs that load a checkpoint: ``--trust-checkpoint`` and ``--user-dir``."""

import argparse
import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fairseq import utils

import surface_fusion
from surface_fusion.compat.checkpoint_loading import TRUST_VARIABLE
from surface_fusion.errors import SurfaceFusionError


def add_trust_flag(parser: Any) -> None:
    """Add ``--trust-checkpoint``; see :func:`trusted_checkpoints`."""
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="load checkpoints that contain arbitrary pickled objects or name other models and tasks than "
        "SurfaceFusion models and plain Transformers; such a file can run any code, so use this only for "
        "files from people you trust",
    )


@contextlib.contextmanager
def trusted_checkpoints(trust: bool) -> Iterator[None]:
    """If *trust*, set torch's variable that allows full unpickling, in the block and its child processes."""
    before = os.environ.get(TRUST_VARIABLE)
    if trust:
        os.environ[TRUST_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is not None:
            os.environ[TRUST_VARIABLE] = before
        elif trust:
            del os.environ[TRUST_VARIABLE]


def add_checkpoint_flags(parser: Any) -> None:
    """Add ``--trust-checkpoint`` and, for :func:`import_user_dir`, ``--user-dir``."""
    add_trust_flag(parser)
    parser.add_argument(
        "--user-dir",
        metavar="DIR",
        help="folder of Python code to import first, for example to register the checkpoint's method",
    )


def import_user_dir(folder: str | None) -> str:
    """Import *folder*, the value of ``--user-dir``, and return it; without one, return this package's.

    Raises:
        SurfaceFusionError: it does not exist.
    """
    if folder is None:
        return str(Path(surface_fusion.__file__).parent)
    try:
        utils.import_user_module(argparse.Namespace(user_dir=folder))
    except FileNotFoundError as error:
        fault = f"--user-dir {error} does not exist; leave it out to use surface-fusion's own"
        raise SurfaceFusionError(fault) from error
    return folder
