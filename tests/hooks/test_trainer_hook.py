"""Which trainer a model gets, class for class."""

import copy
import pickle
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.trainer import Trainer

from surface_fusion import SurfaceFusionError
from surface_fusion.hooks.trainer_hook import uses_fast_trainer
from surface_fusion.training.trainer import SurfaceFusionTrainer
from tests.helpers.small_training import OPTIMISER, PLAIN
from tests.helpers.trainers import PACKED, batches_of, build_trainer


def test_surfacefusion_models_get_our_trainer(data: Path) -> None:
    for flags in ((), PACKED):
        assert type(build_trainer(data, *flags)) is SurfaceFusionTrainer


def test_sf_plain_gives_fairseqs_trainer(data: Path) -> None:
    trainer = build_trainer(data, "--sf-plain")
    assert type(trainer) is Trainer
    assert type(trainer.criterion) is LabelSmoothedCrossEntropyCriterion


def test_other_models_get_fairseqs_trainer(data: Path) -> None:
    assert type(build_trainer(data, train=(*PLAIN, *OPTIMISER))) is Trainer


def test_a_subclass_of_the_trainer_is_not_replaced(data: Path) -> None:
    made = build_trainer(data)

    class Own(Trainer):
        pass

    class Other(Trainer):
        def __init__(self, name: str, *args: Any, extra: int) -> None:
            super().__init__(*args)
            self.name, self.extra = name, extra

    settings = made.cfg, made.task, made.get_model(), made.get_criterion()
    assert type(Own(*settings)) is Own
    other = Other("name", *settings, extra=1)
    assert type(other) is Other and (other.name, other.extra) == ("name", 1)


@pytest.mark.slow
def test_settings_may_be_given_by_name(data: Path) -> None:
    made = build_trainer(data)
    given: dict[str, Any] = {"cfg": made.cfg, "task": made.task, "model": made.get_model()}
    trainer = Trainer(**given, criterion=made.get_criterion(), quantizer=None)
    assert type(trainer) is SurfaceFusionTrainer


def test_copied_and_pickled_trainers_are_fairseqs() -> None:
    """As ``copy`` and ``pickle`` make it."""
    assert type(Trainer.__new__(Trainer)) is Trainer
    assert type(copy.copy(Trainer.__new__(Trainer))) is Trainer
    assert type(pickle.loads(pickle.dumps(Trainer.__new__(Trainer)))) is Trainer


def test_a_tpu_and_an_old_configuration_are_left_to_fairseq(data: Path) -> None:
    trainer = build_trainer(data)
    assert uses_fast_trainer(trainer.cfg, trainer.model)
    assert not uses_fast_trainer(Namespace(), trainer.model)
    trainer.cfg.common.tpu = True
    assert not uses_fast_trainer(trainer.cfg, trainer.model)


@pytest.mark.parametrize("plain", [(), ("--sf-plain",)])
def test_a_number_out_of_range_is_refused(data: Path, plain: tuple[str, ...]) -> None:
    with pytest.raises(SurfaceFusionError, match=r"--label-smoothing: 1\.5|--label-smoothing 1\.5"):
        build_trainer(data, *plain, "--label-smoothing", 1.5)


def test_updates_equal_those_of_fairseqs_trainer(data: Path) -> None:
    """The same losses and weights, bit for bit, where the modules are the same."""

    def weights(kind: type[Trainer]) -> tuple[list[float], list[torch.Tensor]]:
        made = build_trainer(data, "--dropout", 0.2, "--update-freq", 2)
        torch.manual_seed(1)
        model = made.task.build_model(made.cfg.model)
        trainer = object.__new__(kind)
        kind.__init__(trainer, made.cfg, made.task, model, made.get_criterion())
        losses = [trainer.train_step(samples)["loss"] for samples in batches_of(trainer)]
        return losses, [p.detach() for p in trainer.model.parameters()]

    (ours, our_weights), (theirs, their_weights) = weights(SurfaceFusionTrainer), weights(Trainer)
    assert ours == theirs and len(set(ours)) > 3
    assert all(a.equal(b) for a, b in zip(our_weights, their_weights, strict=True))
