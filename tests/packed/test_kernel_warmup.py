"""Every kernel that a step needs is called before, and a failure stops nothing."""

import gc
import logging
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest
import torch

from surface_fusion.ops.backend import INSTALLED
from surface_fusion.packed import kernel_warmup as module
from surface_fusion.packed.kernel_warmup import Compilation, fork, kernel_calls
from tests.helpers.interpreter import INTERPRETED, assert_passes_in_the_interpreter, starts_the_interpreter
from tests.helpers.tiny import shaken

MODELS = {
    "hard": ("--surfacefusion", "att", "--sf-gate", "0.8", "--dropout", "0.1"),
    "learned gate, pre-norm": (
        "--surfacefusion",
        "att",
        "--encoder-normalize-before",
        "--decoder-normalize-before",
    ),
    "renormalised": ("--surfacefusion", "att", "--sf-gate", "0.8", "--sf-renormalize"),
    "mean": ("--surfacefusion", "mean", "--sf-mode", "soft"),
    "plain": (),
}


@starts_the_interpreter
def test_in_the_interpreter() -> None:
    assert_passes_in_the_interpreter(__file__)


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
@pytest.mark.parametrize("name", MODELS)
def test_all_kernels_are_called(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    from surface_fusion.ops import add_norm_triton, linear_cross_entropy_triton, packed_attention_triton

    called = set()

    def noted(function):
        def call(*args):
            called.add(function.__name__)
            return function(*args)

        return call

    names = ("attention_forward", "attention_backward")
    for name_ in names:
        monkeypatch.setattr(packed_attention_triton, name_, noted(getattr(packed_attention_triton, name_)))
    more = ("add_norm_forward", "add_norm_backward", "relu_backward")
    for name_ in more:
        monkeypatch.setattr(add_norm_triton, name_, noted(getattr(add_norm_triton, name_)))
    monkeypatch.setattr(
        linear_cross_entropy_triton, "softmax_rows_", noted(linear_cross_entropy_triton.softmax_rows_)
    )
    for job in kernel_calls(shaken(*MODELS[name]), 0.1, torch.float32, torch.device("cpu")):
        job()
    assert called == {*names, *more, "softmax_rows_"}


def test_a_failure_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: object) -> None:
        raise ValueError("no compiler")

    monkeypatch.setattr(module, "kernel_calls", fail)
    with caplog.at_level(logging.WARNING):
        Compilation(None, 0.1, torch.float32, torch.device("cpu")).wait()
    assert "no compiler" in caplog.text


@pytest.mark.skipif(not INSTALLED or INTERPRETED, reason="needs Triton's compiler")
def test_children_compile_for_a_gpu_that_is_not_here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from triton.backends.compiler import GPUTarget

    from surface_fusion.ops.add_norm_triton import relu_backward

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    x = torch.zeros(64, 32, dtype=torch.float16)
    for child in fork([partial(relu_backward, x, x, 1.0)], GPUTarget("cuda", 90, 32)):
        child.join()  # successful or not: what launches the kernel needs CUDA's library
    assert [path.name for path in tmp_path.glob("*/*.cubin")] == ["_relu_backward_kernel.cubin"]


@pytest.mark.skipif(not INSTALLED or INTERPRETED, reason="needs Triton's compiler")
def test_a_child_collects_no_garbage() -> None:
    """The parent's may lie on the GPU, which ended children that met it: their kernels were compiled late."""
    from triton.backends.compiler import GPUTarget

    def job() -> None:
        assert not gc.isenabled()

    child, _ = fork([job], GPUTarget("cuda", 90, 32))
    child.join()
    assert child.exitcode == 0 and gc.isenabled()


def forget_compiled_kernels() -> None:
    """Empty the in-memory caches of kernels that other tests of this process have compiled."""
    from triton.runtime import JITFunction

    from surface_fusion.ops import add_norm_triton, linear_cross_entropy_triton, packed_attention_triton

    for kernels in (packed_attention_triton, add_norm_triton, linear_cross_entropy_triton):
        for kernel in vars(kernels).values():
            if isinstance(kernel, JITFunction):
                kernel.device_caches.clear()


@pytest.mark.skipif(not INSTALLED or INTERPRETED, reason="needs Triton's compiler")
def test_what_is_compiled_does_not_depend_on_the_order(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A kernel's key in Triton's cache did, so this process compiled one again."""
    from triton.backends.compiler import GPUTarget
    from triton.backends.nvidia import driver

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(driver, "CudaLauncher", lambda src, metadata: None)  # needs CUDA's library
    monkeypatch.setattr(driver, "CudaUtils", dict)
    forget_compiled_kernels()
    jobs = kernel_calls(shaken(*MODELS["plain"]), 0.1, torch.float16, torch.device("cpu"))

    def compiled_by(jobs: list[Callable[[], object]]) -> set[Path]:
        for child in fork(jobs, GPUTarget("cuda", 90, 32)):
            child.join()
            assert child.exitcode == 0
        return {*tmp_path.glob("*/*.cubin")}

    one_by_one = compiled_by(jobs)
    assert len(one_by_one) == 7
    assert compiled_by([lambda: [job() for job in jobs]]) == one_by_one


@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_children_compile_what_this_process_needs(
    name: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from triton.runtime import driver

    forget_compiled_kernels()
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    what = shaken(*MODELS[name]), 0.1, torch.float16
    for child in fork(kernel_calls(*what, torch.device("cpu")), driver.active.get_current_target()):
        child.join()
        assert child.exitcode == 0
    compiled = {*tmp_path.glob("*/*.*")}
    assert len({path for path in compiled if path.suffix == ".cubin"}) >= 7
    for job in kernel_calls(*what, torch.device("cuda")):
        job()
    assert {*tmp_path.glob("*/*.*")} == compiled
