"""Where Triton kernels run."""

import torch

from surface_fusion.ops.backend import INTERPRETED, use_kernels


def test_float64_never_uses_the_kernels() -> None:
    assert not use_kernels(torch.zeros(1, dtype=torch.float64))


def test_a_cpu_uses_the_kernels_in_the_interpreter_only() -> None:
    assert use_kernels(torch.zeros(1)) == INTERPRETED
