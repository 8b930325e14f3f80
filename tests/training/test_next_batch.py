"""Trainings whose next batch's forward is begun early are those whose is not."""

import copy
import weakref
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq import options, tasks
from fairseq.data.iterators import BufferedIterator, GroupedIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from surface_fusion.packed.batch import pack
from surface_fusion.packed.forward_backward import tokens_of
from surface_fusion.packed.forward_prefetch import MISSES, ForwardAhead
from surface_fusion.packed.step import PackedStep
from surface_fusion.training import next_batch
from tests.helpers.small_training import TRAIN
from tests.helpers.tiny import USER_DIR

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


class Eager:
    """On a CPU, in the place of graphs, which are what is begun."""

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
    given: Callable[[list[Any]], list[Any]] = lambda samples: samples,
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
            logged = trainer.train_step(given(samples))
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
    begun: list[int] = []
    begin = ForwardAhead.begin
    monkeypatch.setattr(ForwardAhead, "begin", lambda *args: begun.append(1) or begin(*args))
    got = train(data, between=clamp)
    assert not any(taken)
    assert len(begun) == MISSES  # then it is given up
    not_begun(monkeypatch)
    assert train(data, between=clamp) == got


def test_an_update_that_overflows(
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
    assert taken[1:] == [False, True, True, True, False, True, True]
    not_begun(monkeypatch)
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


@pytest.mark.parametrize("given", [reverse, reverse_in_place, fewer, other])
def test_a_batch_that_was_changed_meanwhile(
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
    not_begun(monkeypatch)
    assert train(data, given=given) == got


def test_another_batch_than_the_next(
    data: Path, eager: None, copied: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[Any] = []

    def backwards(samples: list[Any]) -> list[Any]:
        """The first four are kept, and then come one by one instead of others, which wait themselves."""
        kept.append(samples)
        return kept.pop(0) if len(kept) > 2 else samples

    got = train(data, epochs=1, given=backwards)
    assert not any(taken[4:])  # what was given is not what the buffer gave last
    not_begun(monkeypatch)
    kept.clear()
    assert train(data, epochs=1, given=backwards) == got


def test_memory_that_runs_out_costs_nothing_but_the_early_begin(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    begin, run = PackedStep.begin, Eager.run
    full: list[bool] = []

    def begin_or_fail(self: Any, sample: Any, seed: int) -> bool:
        full.append(len(full) % 2 == 1)
        return begin(self, sample, seed)

    def run_or_fail(self: Any, sample: Any) -> Any:
        if full and full[-1]:
            full[-1] = False
            raise torch.cuda.OutOfMemoryError("out of memory")
        return run(self, sample)

    monkeypatch.setattr(PackedStep, "begin", begin_or_fail)
    monkeypatch.setattr(Eager, "run", run_or_fail)
    got = train(data, epochs=1)
    assert 2 * sum(taken) in range(len(taken) - 3, len(taken) + 1)
    not_begun(monkeypatch)
    full.clear()
    assert train(data, epochs=1) == got


def test_a_batch_without_a_captured_graph_waits(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Eager, "covers", lambda self, sample: sample["nsentences"] % 16 == 0)
    got = train(data)
    assert 0 < sum(taken) < len(taken) - 4
    not_begun(monkeypatch)
    assert train(data) == got


def test_what_is_no_next_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty buffer, an epoch's end, an error, a dummy; and nothing after an update that did not come."""
    begun: list[Any] = []
    step = SimpleNamespace(begin=lambda sample, seed: begun.append((sample, seed)) or True)
    trainer: Any = SimpleNamespace(
        model=None,
        cfg=SimpleNamespace(common=SimpleNamespace(seed=7)),
        get_criterion=lambda: SimpleNamespace(step_of=lambda model: step),
        _prepare_sample=lambda batch: (batch, False),
    )
    monkeypatch.setattr(next_batch, "is_fairseqs_loop", lambda trainer: True)
    batch = {"net_input": {"src_tokens": torch.ones(2)}}
    batches: list[Any] = [{"nsentences": 1}, {}, {"nsentences": 2}, None, {"nsentences": 3}, batch]
    buffered = BufferedIterator(len(batches) + 1, batches)
    buffered.fast_training = True

    def update(trainer: Any, samples: Any) -> None:
        next_batch.begin_next(lambda trainer, number: None, trainer, 3)

    for _ in range(2):
        next_batch.use_begun(update, trainer, [next(buffered)])  # then nothing but a dummy follows
        assert begun == [] and not hasattr(trainer, "begun")
        next_batch.use_begun(lambda trainer, samples: None, trainer, [next(buffered)])  # an overflow
        next_batch.begin_next(lambda trainer, number: None, trainer, 3)
        assert begun == []
    buffered._consumer.join()
    samples = [next(buffered)]
    next_batch.use_begun(update, trainer, [{"of": "another list"}])
    assert begun == []
    next_batch.use_begun(update, trainer, samples)
    assert begun == [(batch, 10)] and trainer.begun.batch is batch
    next_batch.use_begun(update, trainer, [next(buffered)])  # the end follows
    assert len(begun) == 1 and not hasattr(trainer, "begun")
    empty = BufferedIterator(2, [])
    empty.fast_training = True
    next_batch._begin(trainer, empty._queue.queue, 3)
    assert len(begun) == 1
    alive = weakref.ref(buffered)
    del buffered
    assert alive() is None  # nobody keeps it, nor its batches


def test_without_a_buffer_nothing_is_begun(data: Path, eager: None, taken: list[bool]) -> None:
    train(data, "--data-buffer-size", 0, epochs=1)
    assert not any(taken)


def test_in_another_loop_nothing_is_begun(
    data: Path, eager: None, taken: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(next_batch, "is_fairseqs_loop", lambda trainer: False)
    train(data, epochs=1)
    assert taken and not any(taken)


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
