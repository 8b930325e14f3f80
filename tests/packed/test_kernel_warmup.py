"""All kernels of a training step are called; a failure is logged only."""

import logging

import pytest
import torch

from surface_fusion.packed import kernel_warmup as module
from surface_fusion.packed.kernel_warmup import compile_kernels, kernel_calls
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
    from surface_fusion.ops import (
        activation_triton,
        add_norm_triton,
        linear_cross_entropy_triton,
        packed_attention_triton,
    )

    called = set()

    def counted(function):
        def call(*args):
            called.add(function.__name__)
            return function(*args)

        return call

    kernels = {
        packed_attention_triton: ("attention_forward", "attention_backward"),
        add_norm_triton: ("add_norm_forward", "add_norm_backward"),
        activation_triton: ("relu_backward",),
        linear_cross_entropy_triton: ("softmax_rows_",),
    }
    for module_, functions in kernels.items():
        for function in functions:
            monkeypatch.setattr(module_, function, counted(getattr(module_, function)))
    for call in kernel_calls(shaken(*MODELS[name]), 0.1, torch.float32, torch.device("cpu")):
        call()
    assert called == {function for functions in kernels.values() for function in functions}


@pytest.mark.skipif(not INTERPRETED, reason="needs Triton's interpreter")
def test_the_log_tells_the_number_of_kernels(caplog: pytest.LogCaptureFixture) -> None:
    model = shaken(*MODELS["plain"])
    caplog.clear()
    with caplog.at_level(logging.INFO):
        compile_kernels(model, 0.1, torch.float32, torch.device("cpu"))
    assert caplog.messages == ["compiling 6 GPU kernels: about 6 s, once per machine"]


def test_a_failure_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: object) -> None:
        raise ValueError("no compiler")

    monkeypatch.setattr(module, "kernel_calls", fail)
    with caplog.at_level(logging.WARNING):
        compile_kernels(None, 0.1, torch.float32, torch.device("cpu"))
    assert "no compiler" in caplog.text


@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU")
@pytest.mark.parametrize("name", MODELS)
def test_on_a_gpu(name: str, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        compile_kernels(shaken(*MODELS[name]), 0.1, torch.float16, torch.device("cuda"))
    torch.cuda.synchronize()
    assert not caplog.records
