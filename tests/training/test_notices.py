"""What the log says of numbers that are not what they seem, in a training and a validation."""

import logging
import re
from typing import Any

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion

from surface_fusion.cli.main import main
from surface_fusion.criterions.fused_label_smoothed_cross_entropy import (
    FusedLabelSmoothedCrossEntropyCriterion,
)
from surface_fusion.training.notices import log_before_first_batch, notices
from tests.helpers.small_training import TRAIN
from tests.helpers.tiny import build

ATT = ("--surfacefusion", "att")
HARD = (*ATT, "--sf-gate", "0.8")


def said(flags: tuple[str, ...], kind: Any, optimizer: str | None = "adam") -> list[tuple[int, str]]:
    model, task = build(*flags)
    return list(notices(model, kind(task, False, 0.1), optimizer))


@pytest.mark.parametrize("flags", [HARD, ATT, ("--surfacefusion", "mean", "--sf-gate", "0.8")])
def test_hard_fusion_logs_that_its_losses_are_not_comparable(flags: tuple[str, ...]) -> None:
    [(level, text)] = said(flags, FusedLabelSmoothedCrossEntropyCriterion)
    assert level == logging.INFO and "compare normalized_nll_loss (bits per token)" in text
    [(level, text)] = said(flags, LabelSmoothedCrossEntropyCriterion)
    assert level == logging.WARNING and "do not compare them with another model's" in text


@pytest.mark.parametrize("flags", [(), (*HARD, "--sf-renormalize"), (*ATT, "--sf-mode", "soft")])
def test_normalised_modes_log_no_notice(flags: tuple[str, ...]) -> None:
    assert not said(flags, FusedLabelSmoothedCrossEntropyCriterion)
    assert not said(flags, LabelSmoothedCrossEntropyCriterion)


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_layerdrop_with_flat_adam_differs_from_adam(stack: str) -> None:
    flags = (f"--{stack}-layerdrop", "0.2")
    [(_, text)] = said(flags, LabelSmoothedCrossEntropyCriterion, "flat_adam")
    assert text.startswith("LayerDrop with --optimizer flat_adam")
    assert not said(flags, LabelSmoothedCrossEntropyCriterion, "adam")
    assert not said((), LabelSmoothedCrossEntropyCriterion, "flat_adam")


def test_a_validation_logs_the_notice_once(caplog: pytest.LogCaptureFixture) -> None:
    model, task = build(*HARD)
    step = log_before_first_batch(lambda task, sample, model, criterion: sample)
    criterion = LabelSmoothedCrossEntropyCriterion(task, False, 0.1)
    assert [step(task, i, model, criterion) for i in range(3)] == [0, 1, 2]
    assert len([r for r in caplog.records if "do not compare" in r.getMessage()]) == 1


def test_training_and_validation_log_the_normalised_loss(
    data: Any, tmp_path: Any, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    flags = ("--save-dir", "s", "--max-update", "2", "--optimizer", "flat_adam", "--encoder-layerdrop", "0.2")
    flags += ("--best-checkpoint-metric", "normalized_nll_loss")
    flags += ("--criterion", "fused_label_smoothed_cross_entropy")
    assert main(["train", str(data), *map(str, TRAIN), *flags]) == 0
    out = capfd.readouterr().out
    assert len(re.findall("compare normalized_nll_loss", out)) == 1
    assert len(re.findall("LayerDrop with --optimizer flat_adam", out)) == 1
    [logged] = re.findall(r"valid on .*normalized_nll_loss ([\d.]+)", out)
    best = torch.load("s/checkpoint_best.pt", weights_only=True)["extra_state"]["best"]
    assert best == pytest.approx(float(logged), abs=1e-3)
    assert main(["validate", str(data), "--path", "s/checkpoint_best.pt", "--batch-size", "8", "--cpu"]) == 0
    out = capfd.readouterr().out
    assert len(re.findall("compare normalized_nll_loss", out)) == 1
    assert re.search(r"normalized_nll_loss \d", out)
