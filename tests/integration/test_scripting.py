"""torch.jit gives the same on fairseq's modules with and without the plugin; our models can be traced.

Tests ``modules/torchscript.py``.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator

from surface_fusion import SurfaceFusionError
from tests.helpers import warm_processes
from tests.helpers.scripted_fairseq import Logits
from tests.helpers.tiny import SHARED, batch, build, shaken

MODELS = {
    "plain encoder and decoder": ("--sf-plain",),
    "no fusion": (),
    "hard": ("--surfacefusion", "att", "--sf-gate", "0.8"),
    "learned gate": ("--surfacefusion", "att"),
    "mean": ("--surfacefusion", "mean", "--sf-mode", "soft"),
    "average": ("--encoder-fusion", "average"),
    "transparent": ("--encoder-fusion", "transparent"),
    "lstm": ("--encoder-fusion", "lstm"),
    "layer-wise": ("--layer-wise-attention",),
    "LayerDrop": ("--encoder-layerdrop", "0.1", "--decoder-layerdrop", "0.1"),
}


def scripted(how: str) -> str:
    done = warm_processes.run("tests.helpers.scripted_fairseq:main", how)
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()[-1]


@pytest.mark.slow
def test_the_plugin_does_not_change_scripting_and_tracing_of_fairseq() -> None:
    plain = scripted("plain")
    assert "tokens" not in plain and '"diverse"' in plain
    assert scripted("plugin") == plain


def inputs(seed: int) -> tuple[Any, ...]:
    net = batch(seed=seed)["net_input"]
    return net["src_tokens"], net["src_lengths"], net["prev_output_tokens"]


@pytest.mark.parametrize("flags", MODELS.values(), ids=list(MODELS))
@torch.no_grad()
@pytest.mark.slow
def test_a_model_of_ours_is_traced(flags: tuple[str, ...]) -> None:
    model = shaken(SHARED, *flags)
    model(*inputs(0))  # the decoder keeps its causal mask: a second trace would differ from the first
    traced = torch.jit.trace(Logits(model), inputs(0))
    torch.testing.assert_close(traced(*inputs(1)), model(*inputs(1))[0], atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("flags", [MODELS["no fusion"], MODELS["hard"], MODELS["transparent"]])
@pytest.mark.slow
def test_unsupported_scripting_is_refused_in_one_line(flags: tuple[str, ...]) -> None:
    model, task = build(SHARED, *flags)
    expected = r"^torch\.jit\.script cannot compile SurfaceFusionEncoder, .*; use torch\.jit\.trace, or .*$"
    for module in (model, SequenceGenerator([model], task.target_dictionary)):
        with pytest.raises(SurfaceFusionError, match=expected):
            torch.jit.script(module)


@torch.no_grad()
def test_a_model_of_fairseqs_own_parts_is_scripted() -> None:
    model = shaken(SHARED, "--sf-plain")
    torch.testing.assert_close(torch.jit.script(model)(*inputs(1))[0], model(*inputs(1))[0])


@pytest.mark.parametrize("flags", [MODELS["plain encoder and decoder"], MODELS["hard"]])
@torch.no_grad()
def test_a_model_is_exported_to_onnx(flags: tuple[str, ...], tmp_path: Path) -> None:
    onnx = pytest.importorskip("onnx", reason="torch.onnx.export needs the package onnx")
    model = Logits(shaken(SHARED, *flags))
    torch.onnx.export(model, inputs(0), str(tmp_path / "model.onnx"), dynamo=False, opset_version=17)
    onnx.checker.check_model(str(tmp_path / "model.onnx"))
    assert len(onnx.load(str(tmp_path / "model.onnx")).graph.output) == 1
