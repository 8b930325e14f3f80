"""Test Triton kernels without a GPU: run a test file again, in a new process with Triton's interpreter.

Triton reads TRITON_INTERPRET=1 when it is first imported, hence the new process.
"""

import os
import subprocess
import sys

import pytest
import torch

from surface_fusion.ops.backend import INSTALLED, INTERPRETED

DEVICE = "cuda" if torch.cuda.is_available() and not INTERPRETED else "cpu"

runs_here = pytest.mark.skipif(
    not INSTALLED or not (INTERPRETED or torch.cuda.is_available()),
    reason="no triton, or nothing to run it on",
)
starts_the_interpreter = pytest.mark.skipif(
    INTERPRETED or not INSTALLED, reason="no triton, or interpreted already"
)


def assert_passes_in_the_interpreter(config: pytest.Config, *tests: str) -> None:
    """Run pytest on files or tests (``FILE::NAME``), selected by the same ``-m`` as *config*."""
    done = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-q",
            "-p",
            "no:cacheprovider",
            "-m",
            config.option.markexpr,
            *tests,
        ],
        # Rows beyond the last divide by zero before they are masked.
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
