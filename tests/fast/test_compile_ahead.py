"""Every kernel that a step needs is called before, and a failure stops nothing."""

import contextlib
import logging

import pytest
import torch
from interpreter import INTERPRETED, assert_passes_in_the_interpreter, starts_the_interpreter
from tiny import shaken

from surface_fusion.fast import compile_ahead as module
from surface_fusion.fast.compile_ahead import Compilation, compile_ahead

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
    from surface_fusion.fast import attention_kernels, elementwise_kernels

    monkeypatch.setattr(torch.cuda, "device", lambda _: contextlib.nullcontext())
    called = set()

    def noted(function):
        def call(*args):
            called.add(function.__name__)
            return function(*args)

        return call

    names = ("attention_forward", "attention_backward")
    for name_ in names:
        monkeypatch.setattr(attention_kernels, name_, noted(getattr(attention_kernels, name_)))
    more = ("add_norm_forward", "add_norm_backward", "relu_backward")
    for name_ in more:
        monkeypatch.setattr(elementwise_kernels, name_, noted(getattr(elementwise_kernels, name_)))
    compile_ahead(shaken(*MODELS[name]), 0.1)
    assert called == {*names, *more}


def test_a_failure_is_logged(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    def fail(*args: object) -> None:
        raise ValueError("no compiler")

    monkeypatch.setattr(module, "compile_ahead", fail)
    with caplog.at_level(logging.WARNING):
        Compilation(None, 0.1).wait()
    assert "no compiler" in caplog.text
