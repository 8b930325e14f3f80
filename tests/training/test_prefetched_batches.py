"""Trainings with forward prefetch equal those without.

Tests ``training/trainer.py`` with ``packed/forward_prefetch.py``.
"""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.data.iterators import BufferedIterator
from fairseq.trainer import Trainer

from surface_fusion.packed.batch import pack, tokens_of
from surface_fusion.packed.forward_prefetch import MISSES, ForwardPrefetch
from surface_fusion.packed.step import PackedStep
from surface_fusion.training.trainer import SurfaceFusionTrainer
from tests.helpers.small_training import TRAIN
from tests.helpers.trainers import PACKED, batches_of, build_trainer

FLAGS = (*PACKED, "--dropout", 0.2, "--attention-dropout", 0.1)
SIZES = (
    *("--encoder-embed-dim", 64, "--encoder-ffn-embed-dim", 64, "--max-tokens", 200),
    *("--encoder-attention-heads", 1, "--decoder-attention-heads", 1),
)
"""Those that the GPU's kernels take."""


class Eager:
    """Runs the step directly on a CPU, in place of the captured graphs that prefetch needs."""

    def __init__(self, step: PackedStep) -> None:
        self.step = step

    def covers(self, sample: dict[str, Any]) -> bool:
        return True

    def run(self, sample: dict[str, Any]) -> Any:
        return self.step.forward(pack(*tokens_of(sample), self.step.padding_idx))

    def capture_pending(self) -> None:
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
    """For each batch, whether its forward had been launched before."""
    found: list[bool] = []
    take = ForwardPrefetch.take

    def watched(self: Any, tokens: Any) -> Any:
        outcome = take(self, tokens)
        found.append(outcome is not None)
        return outcome

    monkeypatch.setattr(ForwardPrefetch, "take", watched)
    return found


def train(
    data: Path,
    *flags: object,
    updates: int = 99,
    epochs: int = 2,
    between: Callable[[Any], None] = lambda trainer: None,
    given: Callable[[list[Any]], list[Any]] = lambda samples: samples,
) -> list[float]:
    """Losses of the first *updates* of each epoch, as in fairseq's command line; then a validation's."""
    trainer = build_trainer(data, *FLAGS, *flags, train=TRAIN)
    seen: list[float] = []
    for epoch in range(1, epochs + 1):
        for samples in batches_of(trainer, epoch).take(updates):
            logged = trainer.train_step(given(samples))
            if logged is not None:
                seen.append(logged["loss"])
            between(trainer)
    valid = trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False)
    seen.append(float(trainer.valid_step(next(valid))["loss"]))
    return seen


def without_prefetch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(PackedStep, "prefetch", lambda self, sample, seed: False)


def validate(trainer: Any) -> None:
    """Batches from another buffer, whose forwards drop nothing."""
    for sample in trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False):
        trainer.valid_step(sample)


def clamp(trainer: Any) -> None:
    """What is no part of an update."""
    with torch.no_grad():
        for parameter in trainer.model.parameters():
            parameter.clamp_(-0.05, 0.05)


@pytest.mark.slow
@pytest.mark.parametrize("update_freq", [1, 3])
@pytest.mark.parametrize("between", [lambda trainer: None, validate])
def test_a_training_with_prefetch_equals_one_without(
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
    assert not any(taken[:update_freq]) and taken[update_freq]
    without_prefetch(monkeypatch)
    taken.clear()
    assert train(data, *flags, between=between) == got
    assert not any(taken)


@pytest.mark.slow
def test_a_training_whose_parameters_change_between_updates(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    launched: list[int] = []
    launch = ForwardPrefetch.launch
    monkeypatch.setattr(ForwardPrefetch, "launch", lambda *args: launched.append(1) or launch(*args))
    got = train(data, between=clamp)
    assert not any(taken)
    assert len(launched) == MISSES  # then prefetching stops
    without_prefetch(monkeypatch)
    assert train(data, between=clamp) == got


@pytest.mark.slow
def test_a_training_with_an_overflow(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing is begun after it, and the next has the same seed."""

    overflowed: list[int] = []

    def overflow(trainer: Any) -> None:
        def clip_or_overflow(max_norm: float) -> Any:
            del trainer.clip_grad_norm
            raise OverflowError("minimum not reached")

        if trainer.get_num_updates() == 3 and not overflowed:
            overflowed.append(3)
            trainer.clip_grad_norm = clip_or_overflow

    monkeypatch.setattr(torch.Tensor, "cuda", lambda self: self)  # where fairseq wants a norm of 0
    got = train(data, epochs=1, between=overflow)
    assert taken == [False, True, True, True, False, True, True]
    without_prefetch(monkeypatch)
    overflowed.clear()
    assert train(data, epochs=1, between=overflow) == got


@pytest.fixture
def copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are copied, as to a GPU; what is there already is not."""
    copies: list[Any] = []

    def prepare(self: Any, batch: Any, is_dummy: bool = False) -> Any:
        if not any(batch is copy for copy in copies):
            copies.append(batch := copy.deepcopy(batch))
        return batch, False

    monkeypatch.setattr(Trainer, "_prepare_sample", prepare)


def reverse(samples: list[Any]) -> list[Any]:
    """Other tokens, in the same batch."""
    samples[0]["net_input"]["src_tokens"] = samples[0]["net_input"]["src_tokens"].flip(0)
    return samples


def reverse_in_place(samples: list[Any]) -> list[Any]:
    tokens = samples[0]["net_input"]["src_tokens"]
    tokens.copy_(tokens.flip(0))
    return samples


def fewer(samples: list[Any]) -> list[Any]:
    """What is normalised by."""
    samples[0]["ntokens"] -= 1
    return samples


def other(samples: list[Any]) -> list[Any]:
    return [dict(samples[0])]


@pytest.mark.slow
@pytest.mark.parametrize("given", [reverse, reverse_in_place, fewer, other])
def test_a_changed_batch_is_not_taken_from_the_prefetch(
    data: Path,
    eager: None,
    copied: None,
    taken: list[bool],
    monkeypatch: pytest.MonkeyPatch,
    given: Callable[[list[Any]], list[Any]],
) -> None:
    train(data, epochs=1)
    assert any(taken)
    taken.clear()
    got = train(data, given=given)
    assert not any(taken)
    without_prefetch(monkeypatch)
    assert train(data, given=given) == got


@pytest.mark.slow
def test_a_batch_other_than_the_next_is_not_taken_from_the_prefetch(
    data: Path, eager: None, copied: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    def backwards(samples: list[Any]) -> list[Any]:
        """The first four are kept, and then come one by one instead of others, which wait themselves."""
        kept.append(samples)
        return kept.pop(0) if len(kept) > 2 else samples

    got = train(data, epochs=1, given=backwards)
    assert not any(taken[4:])  # what was given is not what the buffer gave last
    without_prefetch(monkeypatch)
    kept.clear()
    assert train(data, epochs=1, given=backwards) == got


def test_out_of_memory_in_a_prefetch_is_ignored(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    prefetch, run = PackedStep.prefetch, Eager.run
    full: list[bool] = []

    def prefetch_or_fail(self: Any, sample: Any, seed: int) -> bool:
        full.append(len(full) % 2 == 1)
        return prefetch(self, sample, seed)

    def run_or_fail(self: Any, sample: Any) -> Any:
        if full and full[-1]:
            full[-1] = False
            raise torch.cuda.OutOfMemoryError("out of memory")
        return run(self, sample)

    monkeypatch.setattr(PackedStep, "prefetch", prefetch_or_fail)
    monkeypatch.setattr(Eager, "run", run_or_fail)
    got = train(data, epochs=1)
    assert 2 * sum(taken) in range(len(taken) - 3, len(taken) + 1)
    without_prefetch(monkeypatch)
    full.clear()
    assert train(data, epochs=1) == got


@pytest.mark.slow
def test_a_batch_without_a_captured_graph_is_not_prefetched(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Eager, "covers", lambda self, sample: sample["nsentences"] % 16 == 0)
    got = train(data)
    assert 0 < sum(taken) < len(taken) - 4
    without_prefetch(monkeypatch)
    assert train(data) == got


class FailingBatches:
    """A data loader that cannot read its second batch."""

    def __len__(self) -> int:
        return 2

    def __iter__(self) -> Iterator[dict[str, int]]:
        yield {"id": 1}
        raise OSError("not readable")


def filled_buffer(batches: Any) -> BufferedIterator:
    """fairseq's buffer over *batches* after it returned the first one and its thread has read the rest."""
    buffer = BufferedIterator(9, batches)
    next(buffer)
    buffer._consumer.join(timeout=60)
    assert len(buffer._queue.queue) > 0
    return buffer


@pytest.mark.parametrize(
    "make_buffer",
    [
        lambda: BufferedIterator(9, []),
        lambda: filled_buffer([{"id": 1}]),
        lambda: filled_buffer([{"id": 1}, {}]),
        lambda: filled_buffer(FailingBatches()),
    ],
    ids=["empty buffer", "end of the epoch", "dummy batch", "error"],
)
def test_nothing_is_prefetched_if_the_buffer_holds_no_batch(
    data: Path, make_buffer: Callable[[], BufferedIterator]
) -> None:
    trainer = build_trainer(data, *FLAGS)
    trainer.train_step(next(iter(batches_of(trainer))))
    step = trainer.get_criterion().packed_step(trainer.model)
    step.prefetch = lambda sample, seed: pytest.fail("no batch waits")
    trainer._buffer = make_buffer()
    trainer._launch_next_forward(3)
    assert trainer._prefetched is None


def test_setting_the_number_of_updates_prefetches_nothing(data: Path, eager: None) -> None:
    """Only the end of an update does, not a user's call or a loaded checkpoint."""
    trainer = build_trainer(data, *FLAGS)
    batches = iter(batches_of(trainer))
    trainer.train_step(next(batches))
    trainer._prefetched = None
    trainer.set_num_updates(7)
    assert trainer._prefetched is None
    trainer.train_step(next(batches))
    assert trainer._prefetched is not None


def test_without_a_buffer_nothing_is_prefetched(data: Path, eager: None, taken: list[bool]) -> None:
    train(data, "--data-buffer-size", 0, epochs=1)
    assert not any(taken)


def test_a_task_with_steps_of_its_own_prefetches_nothing(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(SurfaceFusionTrainer, "_runs_fairseqs_steps", lambda trainer: False)
    train(data, epochs=1)
    assert taken and not any(taken)


@pytest.mark.slow
def test_other_criteria_and_a_cpu_prefetch_nothing(data: Path, taken: list[bool]) -> None:
    train(data, epochs=1)
    train(data, "--criterion", "label_smoothed_cross_entropy", epochs=1)
    assert not taken


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dtype", [(), ("--fp16",), ("--bf16",)])
def test_a_training_with_prefetch_on_a_gpu(
    data: Path, taken: list[bool], monkeypatch: pytest.MonkeyPatch, dtype: tuple[str, ...]
) -> None:
    """In graphs. With parameters that stay, losses are the same to the bit, so dropout, too."""
    monkeypatch.setitem(globals(), "TRAIN", [flag for flag in TRAIN if flag != "--cpu"])
    exactly = (*SIZES, *dtype, "--lr", 0)
    learning = (*SIZES, *dtype, "--fp16-init-scale", 4)
    got = [train(data, *exactly, between=validate), train(data, *learning)]
    assert 2 * sum(taken) > len(taken)  # not where no graph was captured yet
    without_prefetch(monkeypatch)
    taken.clear()
    assert train(data, *exactly, between=validate) == got[0]
    assert train(data, *learning) == pytest.approx(got[1], rel=1e-2 if dtype else 1e-4)
    assert not any(taken)
