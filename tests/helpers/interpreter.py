"""Triton kernels without a GPU: a test file once more, in a process of its own under Triton's interpreter.

The interpreter is chosen when triton is first imported, by TRITON_INTERPRET=1.
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


def assert_passes_in_the_interpreter(*tests: str) -> None:
    """Run pytest on a file, or on some of its tests (``FILE::NAME``)."""
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", *tests],
        # Rows behind the last divide by zero before a mask takes them away.
        env=os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    assert " passed" in done.stdout
