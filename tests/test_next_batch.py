"""Trainings whose next batch's forward is begun early are those whose is not."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options, tasks
from fairseq.data.iterators import GroupedIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer
from tiny import USER_DIR

from surface_fusion.cli.main import main
from surface_fusion.fast import step as step_module
from surface_fusion.fast.forward_ahead import ForwardAhead
from surface_fusion.fast.packed import pack
from surface_fusion.fast.step import PackedStep
from tests.small_training import PREPROCESS, TRAIN

FLAGS = (
    *("--criterion", "fused_label_smoothed_cross_entropy", "--optimizer", "flat_adam"),
    *("--dropout", 0.2, "--attention-dropout", 0.1, "--user-dir", USER_DIR),
    *("--distributed-world-size", 1),  # fairseq would have one for each GPU
)
SIZES = (
    *("--encoder-embed-dim", 64, "--encoder-ffn-embed-dim", 64, "--max-tokens", 200),
    *("--encoder-attention-heads", 1, "--decoder-attention-heads", 1),
)
"""Those that the GPU's kernels take."""


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data-bin")
    assert main(["preprocess", *map(str, PREPROCESS), "--destdir", str(folder)]) == 0
    return folder


class Eager:
    """On a CPU, in the place of graphs, which are what is begun."""

    def __init__(self, step: PackedStep) -> None:
        self.step = step

    def hold(self, sample: dict[str, Any]) -> bool:
        return True

    def run(self, sample: dict[str, Any]) -> Any:
        return self.step.forward(pack(*step_module._tokens(sample), self.step.padding_idx))

    def record_pending(self) -> None:
        pass


@pytest.fixture
def eager(monkeypatch: pytest.MonkeyPatch) -> None:
    init = PackedStep.__init__

    def with_graphs(self: Any, *args: Any) -> None:
        init(self, *args)
        self._graphs = Eager(self)

    monkeypatch.setattr(PackedStep, "__init__", with_graphs)


@pytest.fixture
def taken(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each batch, whether its forward had been begun."""
    found: list[bool] = []
    take = ForwardAhead.take

    def watched(self: Any, tokens: Any) -> Any:
        outcome = take(self, tokens)
        found.append(outcome is not None)
        return outcome

    monkeypatch.setattr(ForwardAhead, "take", watched)
    return found


def train(
    data: Path,
    *flags: object,
    updates: int = 99,
    epochs: int = 2,
    between: Callable[[Any], None] = lambda trainer: None,
) -> list[float]:
    """Losses of the first *updates* of each epoch, as in fairseq's command line; then a validation's."""
    argv = [data, *TRAIN, *FLAGS, *flags]
    args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, argv)))
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    for split in ("train", "valid"):
        task.load_dataset(split)
    torch.manual_seed(1)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    seen: list[float] = []
    for epoch in range(1, epochs + 1):
        batches = trainer.get_train_iterator(epoch).next_epoch_itr()
        trainer.begin_epoch(epoch)
        for samples in GroupedIterator(batches, cfg.optimization.update_freq[0]).take(updates):
            logged = trainer.train_step(samples)
            if logged is not None:
                seen.append(logged["loss"])
            between(trainer)
    valid = trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False)
    seen.append(float(trainer.valid_step(next(valid))["loss"]))
    return seen


def not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedStep, "begin", lambda self, sample, seed: False)


def validate(trainer: Any) -> None:
    """Batches from another buffer, whose forwards drop nothing."""
    for sample in trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False):
        trainer.valid_step(sample)


def clamp(trainer: Any) -> None:
    """What is no part of an update."""
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.clamp_(-0.05, 0.05)


@pytest.mark.parametrize("update_freq", [1, 3])
@pytest.mark.parametrize("between", [lambda trainer: None, validate])
def test_a_training_is_the_same(
    data: Path,
    eager: None,
    taken: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    between: Callable[[Any], None],
    update_freq: int,
) -> None:
    flags = ("--update-freq", update_freq)
    got = train(data, *flags, between=between)
    updates = (len(got) - 1) // 2
    assert updates > 2 and len(set(got)) == len(got)
    assert sum(taken) == 2 * (updates - 1)  # the first batch of each update but an epoch's first
    trial, *batches = taken
    assert not trial and not any(batches[1:update_freq]) and batches[update_freq]
    not_begun(monkeypatch)
    taken.clear()
    assert train(data, *flags, between=between) == got
    assert not any(taken)


def test_parameters_that_somebody_changes(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    got = train(data, between=clamp)
    assert not any(taken)
    not_begun(monkeypatch)
    assert train(data, between=clamp) == got


def test_an_update_that_overflows(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is begun after it, and the next has the same seed."""

    def overflow(trainer: Any) -> None:
        def clip_or_overflow(max_norm: float) -> Any:
            trainer.clip_grad_norm = clip
            raise OverflowError("minimum not reached")

        if trainer.get_num_updates() == 3 and "clip_grad_norm" not in vars(trainer):
            clip, trainer.clip_grad_norm = trainer.clip_grad_norm, clip_or_overflow

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)  # where fairseq wants a norm of 0
    got = train(data, epochs=1, between=overflow)
    assert taken[1:] == [False, True, True, True, False, True, True]
    not_begun(monkeypatch)
    assert train(data, epochs=1, between=overflow) == got


def test_without_a_buffer_nothing_is_begun(data: Path, eager: None, taken: list[bool]) -> None:
    train(data, "--data-buffer-size", 0, epochs=1)
    assert not any(taken)


def test_other_criteria_and_a_cpu_begin_nothing(data: Path, taken: list[bool]) -> None:
    train(data, epochs=1)
    train(data, "--criterion", "label_smoothed_cross_entropy", epochs=1)
    assert not taken


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [(), ("--fp16",), ("--bf16",)])
def test_on_a_gpu(
    data: Path, taken: list[bool], monkeypatch: pytest.MonkeyPatch, dtype: tuple[str, ...]
) -> None:
    """In graphs. With parameters that stay, losses are the same to the bit, so dropout, too."""
    monkeypatch.setitem(globals(), "TRAIN", [flag for flag in TRAIN if flag != "--cpu"])
    exactly = (*SIZES, *dtype, "--lr", 0)
    learning = (*SIZES, *dtype, "--fp16-init-scale", 4)
    got = [train(data, *exactly, between=validate), train(data, *learning)]
    assert 2 * sum(taken) > len(taken)  # not where a recording was missing
    not_begun(monkeypatch)
    taken.clear()
    assert train(data, *exactly, between=validate) == got[0]
    assert train(data, *learning) == pytest.approx(got[1], rel=1e-2 if dtype else 1e-4)
    assert not any(taken)
