"""The filtered warnings still exist, and the import prints nothing."""

import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from surface_fusion.compat import warning_filters

WARNING_SOURCES = {
    "hydra\\.experimental": ("hydra", "experimental/initialize.py", "no longer experimental"),
    "broadcast_buffers": ("torch", "nn/parallel/distributed.py", "`broadcast_buffers` is deprecated. Use "),
    "version_base": ("hydra", "version.py", "The version_base parameter is not specified"),
    "strict flag": ("hydra", "compose.py", "The strict flag in the compose API is deprecated"),
    "package header": ("hydra", "core/default_element.py", "Usage of deprecated keyword in package header"),
    "ConfigStore schema": (
        "hydra",
        "_internal/config_loader_impl.py",
        "is validated against ConfigStore schema",
    ),
    "torch\\.cuda\\.amp": ("fairseq", "tasks/fairseq_task.py", "torch.cuda.amp.autocast("),
    "mismatched key_padding_mask": ("torch", "nn/functional.py", "Support for mismatched"),
    "pin_memory": (
        "torch",
        "utils/data/dataloader.py",
        "argument is set as true but no accelerator is found",
    ),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": ("torch", "serialization.py", "Environment variable TORCH_FORCE"),
}


@pytest.mark.parametrize("message", [message for message, _, _ in warning_filters.HARMLESS_WARNINGS])
def test_each_filtered_warning_is_still_raised(message: str) -> None:
    (package, file, text) = next(source for key, source in WARNING_SOURCES.items() if key in message)
    folder = Path(next(iter(find_spec(package).submodule_search_locations)))
    # Adjacent string literals make one text.
    source = re.sub(r'"\s*\n\s*f?"', "", (folder / file).read_text())
    assert text in source, f"{package} no longer warns of this: take it out of warning_filters.py"


def test_importing_the_package_prints_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", "import surface_fusion"], capture_output=True, text=True)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "SyntaxWarning" not in line]
    assert (done.returncode, ours) == (0, [])
