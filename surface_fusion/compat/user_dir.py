"""Accept a ``--user-dir`` with this package when the package is already imported."""

import logging
import os
import re
from collections.abc import Callable
from typing import Any

from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def accept_second_copy(import_user_module: Callable[..., Any], args: Any) -> Any:
    """fairseq's ``import_user_module``; uses the imported package in place of a second copy of it.

    Raises:
        SurfaceFusionError: the copy in ``--user-dir`` has another version.
    """
    path = getattr(args, "user_dir", None)
    here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
    folder = os.path.realpath(path) if path else here
    if folder == here or os.path.basename(folder) != os.path.basename(here):
        same = path and folder == here and os.path.basename(os.path.abspath(path)) == "surface_fusion"
        return None if same else import_user_module(args)
    theirs, ours = (_version(os.path.join(f, "version.py")) for f in (folder, here))
    if theirs != ours:
        raise SurfaceFusionError(
            f"--user-dir {path} is surface-fusion {theirs}, but {ours} is already imported from {here}; "
            "uninstall that version or leave --user-dir out"
        )
    logger.warning(
        f"--user-dir {path}: surface-fusion {ours} is already imported from {here}; using that copy"
    )
    return None


def _version(path: str) -> str:
    """The version in the file *path* of a copy of this package, read without importing it."""
    if not os.path.isfile(path):
        return "of an unknown version"
    with open(path, encoding="utf-8") as file:
        match = re.search(r'__version__ = "(.+)"', file.read())
    return match[1] if match else "of an unknown version"
