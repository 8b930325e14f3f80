"""Copy tasks, and accept a second copy of this package."""

import logging
import os
import re
from collections.abc import Callable
from typing import Any

from fairseq import utils
from fairseq.tasks.fairseq_task import StatefulContainer

from surface_fusion.compat.patching import wrap
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def fix_copies_of_tasks() -> None:
    """Let tasks, and thereby the hub's models, be copied and unpickled (fairseq main of 2025).

    ``copy`` looks up ``__setstate__`` on an empty instance; fairseq's ``__getattr__`` then recurses without
    end.
    """

    def get(original: Callable[..., Any], self: Any, name: str) -> Any:
        if "_factories" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no {name} yet")
        return original(self, name)

    wrap(StatefulContainer, "__getattr__", get)


def allow_second_copy() -> None:
    """Accept a ``--user-dir`` with this package when the package is already imported (fs 2081).

    If it is installed by pip and given as a folder too, the same version is loaded once; another version is
    refused.
    """

    def import_user_module(original: Callable[..., Any], args: Any) -> Any:
        path = getattr(args, "user_dir", None)
        here = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))
        folder = os.path.realpath(path) if path else here
        if folder == here or os.path.basename(folder) != os.path.basename(here):
            same = path and folder == here and os.path.basename(os.path.abspath(path)) == "surface_fusion"
            return None if same else original(args)
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

    wrap(utils, "import_user_module", import_user_module)


def _version(path: str) -> str:
    """The version in the file *path* of a copy of this package, read without importing it."""
    if not os.path.isfile(path):
        return "of an unknown version"
    with open(path, encoding="utf-8") as file:
        found = re.search(r'__version__ = "(.+)"', file.read())
    return found[1] if found else "of an unknown version"
