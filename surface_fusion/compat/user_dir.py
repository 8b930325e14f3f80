"""Accept a ``--user-dir`` with this package when the package is already imported."""

import logging
import os
import re
from pathlib import Path
from typing import Any

import fairseq
from hydra.core.hydra_config import HydraConfig

from surface_fusion.compat.patching import Original, repair
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.version import __version__

logger = logging.getLogger(__name__)


@repair("fairseq.utils.import_user_module", probe="second_copy_is_refused", report="fs 2081")
def accept_second_copy(import_user_module: Original, args: Any) -> Any:
    """Use the imported package if ``--user-dir`` is a copy of the same version, which fairseq refuses."""
    path = getattr(args, "user_dir", None)
    if not path:
        return import_user_module(args)
    args.user_dir = path = _existing(path)
    folder, here = os.path.realpath(path), str(Path(__file__).resolve().parents[1])
    if os.path.isfile(folder):
        raise SurfaceFusionError(f"--user-dir {path} is a file; give a folder of Python code")
    if folder == here:
        return None
    if os.path.basename(folder) != os.path.basename(here):
        return import_user_module(args)
    if not os.path.isdir(folder):
        archive = os.path.isfile(os.path.dirname(folder))
        fault = "is in an archive; unpack that" if archive else "does not exist; give the folder"
        raise SurfaceFusionError(f"--user-dir {path} {fault}, or leave --user-dir out")
    file = Path(folder, "version.py")  # not imported
    match = re.search(r'__version__ = "(.+)"', file.read_text(encoding="utf-8")) if file.is_file() else None
    theirs = match[1] if match else "of an unknown version"
    if theirs != __version__:
        raise SurfaceFusionError(
            f"--user-dir {path} is surface-fusion {theirs}, but {__version__} is already imported from "
            f"{here}; uninstall that version or leave --user-dir out"
        )
    logger.warning(
        f"--user-dir {path}: surface-fusion {__version__} is already imported from {here}; using that copy"
    )
    return None


def _existing(path: str) -> str:
    """*path*, or where it is relative to hydra's working folder or, as in fairseq, to fairseq's."""
    folders = ["", fairseq.__path__[0], os.path.dirname(fairseq.__path__[0])]
    if HydraConfig.initialized():  # hydra runs each job in a new folder
        folders.insert(1, HydraConfig.get().runtime.cwd)
    return next((p for f in folders if os.path.exists(p := os.path.join(f, path))), path)
