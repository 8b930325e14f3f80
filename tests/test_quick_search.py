"""Hypotheses that have ended are taken apart on the host: the same ones as fairseq's."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from tiny import ARCH, PAD, SHARED, batch, build, shaken

from surface_fusion import quick_search

OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "len_penalty": {"len_penalty": 2.0},
    "match_source_len": {"match_source_len": True},
    "unnormalised": {"normalize_scores": False},
}


@pytest.fixture(autouse=True)
def fairseqs_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where something unusual is asked for."""
    monkeypatch.setattr(quick_search, "_is_plain", lambda generator: False)


def hypotheses(model: Any, dictionary: Any, **options: Any) -> list[list[dict[str, torch.Tensor]]]:
    generator = SequenceGenerator([model], dictionary, beam_size=3, max_len_b=9, **options)
    net = {k: v for k, v in batch()["net_input"].items() if k != "prev_output_tokens"}
    device = next(model.parameters()).device
    return generator.generate([model], {"net_input": {k: v.to(device) for k, v in net.items()}})


def assert_same(found: Any, expected: Any, ulps: int = 0) -> None:
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            for name, value in other.items():
                rtol = ulps * 2**-23 if name == "score" else 0
                torch.testing.assert_close(one[name], value.cpu(), rtol=rtol, atol=0)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("plain", [(), ("--sf-plain",)], ids=["fast", "with attention"])
def test_the_same_hypotheses(
    options: dict[str, Any], plain: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    dictionary = build(SHARED)[1].target_dictionary
    model = shaken("--surfacefusion", "att", "--sf-gate", "0.8", SHARED, *plain)
    expected = hypotheses(model, dictionary, **options)
    asked = []
    monkeypatch.setattr(quick_search, "_wanted", lambda generator, tokens: asked.append(1) or True)
    assert_same(hypotheses(model, dictionary, **options), expected)
    assert asked and any(hypothesis["attention"].numel() for hypothesis in expected[0])


def test_where() -> None:
    class Other(SequenceGenerator):
        pass

    on_gpu: Any = type("Tokens", (), {"is_cuda": True})()
    plain, other = (cls.__new__(cls) for cls in (SequenceGenerator, Other))
    models = [shaken("--surfacefusion", "att", SHARED)]
    plain.__dict__["model"] = other.__dict__["model"] = Namespace(models=models)
    assert quick_search._wanted(plain, on_gpu) and not quick_search._wanted(other, on_gpu)
    assert not quick_search._wanted(plain, torch.full((1,), PAD))
    for flags in ((), ("--sf-plain",)):
        models[:] = [build(*flags, arch=ARCH if flags else "transformer")[0]]
        assert not quick_search._wanted(plain, on_gpu)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_on_a_gpu() -> None:
    dictionary = build(SHARED)[1].target_dictionary
    model = shaken("--surfacefusion", "att", "--sf-gate", "0.8", SHARED).cuda()
    ours: Any = SequenceGenerator.finalize_hypos
    found = hypotheses(model, dictionary)
    SequenceGenerator.finalize_hypos = ours.__wrapped__
    try:
        expected = hypotheses(model, dictionary)
    finally:
        SequenceGenerator.finalize_hypos = ours
    assert not found[0][0]["tokens"].is_cuda and expected[0][0]["tokens"].is_cuda
    assert_same(found, expected, ulps=1)  # a GPU divides by the length by way of its reciprocal
