"""Modules with a NaN are named after a training has diverged."""

import logging

import pytest
from fairseq.nan_detector import NanDetector

from tests.helpers.tiny import batch, build


@pytest.mark.parametrize("flags", [(), ("--surfacefusion", "att", "--sf-gate", "0.8")])
def test_modules_with_nan_are_named(flags: tuple[str, ...], caplog: pytest.LogCaptureFixture) -> None:
    model, _ = build(*flags)
    model.decoder.layers[1].fc1.bias.data[0] = float("nan")
    caplog.set_level(logging.INFO, logger="fairseq.nan_detector")
    with NanDetector(model.train()):
        model(**batch()["net_input"])[0].sum().backward()
    assert "NaN detected in output of decoder.layers.1.fc1, " in caplog.text
    assert "forward input max" in caplog.text and "backward" in caplog.text
    assert not model.encoder._backward_hooks and not model.encoder._forward_hooks, "removed afterwards"
