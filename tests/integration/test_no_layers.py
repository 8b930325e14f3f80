"""Models without layers on a side train and translate as with ``--sf-plain``, or are refused."""

from argparse import Namespace
from typing import Any

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion

from surface_fusion.criterions.fused_label_smoothed_cross_entropy import (
    FusedLabelSmoothedCrossEntropyCriterion,
)
from surface_fusion.encoder_fusion import methods
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.packed.flat_parameters import FlatParameters
from tests.helpers.tiny import batch, build, incremental_log_probs, log_probs, shaken

NO_DECODER, NO_ENCODER = ("--decoder-layers", "0"), ("--encoder-layers", "0")
LAYERS = [NO_DECODER, NO_ENCODER, (*NO_ENCODER, *NO_DECODER)]
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
WAYS = {
    "plain": (),
    "mean": ("--surfacefusion", "mean", "--sf-gate", "0.8"),
    "max, learned gate": ("--surfacefusion", "max"),
    "att": ("--surfacefusion", "att", "--sf-gate", "0.8"),
    "layer-wise": ("--layer-wise-attention",),
}


def translated(model: Any, sample: dict[str, Any]) -> list[list[int]]:
    task = build()[1]
    generator = task.build_generator([model], Namespace(beam=2, max_len_a=0, max_len_b=8))
    found = task.inference_step(generator, [model], {"net_input": sample["net_input"]})
    return [hypothesis["tokens"].tolist() for hypotheses in found for hypothesis in hypotheses]


@pytest.mark.slow
@pytest.mark.parametrize("layers", LAYERS, ids=" ".join)
@pytest.mark.parametrize("name", WAYS)
@pytest.mark.parametrize("norm", [(), PRE_NORM], ids=["post-norm", "pre-norm"])
def test_models_without_layers_train_and_translate_or_are_refused(
    name: str, layers: tuple[str, ...], norm: tuple[str, ...]
) -> None:
    flags = (*layers, *WAYS[name], *norm)
    if name == "att" and NO_DECODER[0] in layers:
        with pytest.raises(SurfaceFusionError, match="--surfacefusion att with --decoder-layers 0"):
            build(*flags)
        return
    if name == "layer-wise" and layers == NO_ENCODER:
        with pytest.raises(SurfaceFusionError, match="--layer-wise-attention needs an encoder layer"):
            build(*flags)
        return
    model, reference = (shaken(*flags).double().train() for _ in range(2))
    FlatParameters.of(p for p in model.parameters() if p.requires_grad).zero_grad()
    task = build()[1]
    loss = FusedLabelSmoothedCrossEntropyCriterion(task, False, 0.1)(model, batch())[0]
    expected = LabelSmoothedCrossEntropyCriterion(task, False, 0.1)(reference, batch())[0]
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if p.requires_grad:
            wanted = torch.zeros_like(q) if q.grad is None else q.grad
            torch.testing.assert_close(p.grad, wanted, rtol=1e-4, atol=2e-5, msg=n)

    model, plain = shaken(*flags), shaken(*flags, "--sf-plain")
    with torch.no_grad():
        real = batch()["target"].ne(1)
        torch.testing.assert_close(
            incremental_log_probs(model, batch())[real], log_probs(plain, batch())[real], atol=2e-5, rtol=1e-5
        )
    assert translated(model, batch()) == translated(plain, batch())


@pytest.mark.parametrize("layers", LAYERS, ids=" ".join)
@pytest.mark.parametrize("method", methods())
def test_encoder_fusion_without_layers_is_refused(method: str, layers: tuple[str, ...]) -> None:
    with pytest.raises(SurfaceFusionError, match=f"--encoder-fusion {method} needs"):
        build(*layers, "--encoder-fusion", method)
