"""Batches do not hang on the epoch in which a training was started."""

import itertools
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.tasks import FairseqTask

from surface_fusion import SurfaceFusionError
from surface_fusion.cli.main import main
from surface_fusion.compat.resume import with_advice_on_resets
from tests.helpers.small_training import TRAIN


def dataset() -> LanguagePairDataset:
    words = Dictionary()
    sizes = np.random.RandomState(1).randint(3, 9, size=50)
    rows = [torch.full((n,), words.eos()) for n in sizes]
    return LanguagePairDataset(rows, sizes, words, rows, sizes, words)


def batches_by_epoch(start: int, end: int, **kwargs) -> dict[int, list[list[int]]]:
    """What a training that starts in epoch *start* sees in each epoch."""
    task, data = FairseqTask(Namespace(**kwargs.pop("cfg", {}))), dataset()
    seen = {}
    for epoch in range(start, end + 1):
        iterator = task.get_batch_iterator(data, max_tokens=40, seed=3, epoch=epoch, **kwargs)
        seen[epoch] = [batch["id"].tolist() for batch in iterator.next_epoch_itr()]
        assert iterator.epoch == epoch
    return seen


@pytest.mark.parametrize("start", [2, 3, 4])
@pytest.mark.parametrize("cfg", [{}, {"rebuild_batches": True}], ids=["once", "each epoch"])
def test_a_resumed_training_sees_the_batches_of_the_uninterrupted_one(start, cfg):
    whole = batches_by_epoch(1, 4, cfg=cfg)
    assert len({str(batches) for batches in whole.values()}) == 4  # shuffled in every epoch
    assert batches_by_epoch(start, 4, cfg=cfg) == {epoch: whole[epoch] for epoch in range(start, 5)}


@pytest.mark.parametrize("start", [1, 3])
def test_every_sentence_is_seen_once_an_epoch(start):
    for batches in batches_by_epoch(start, 3).values():
        assert sorted(i for batch in batches for i in batch) == list(range(50))


def test_batches_are_regrouped_each_epoch_also_after_a_resume():
    whole = batches_by_epoch(1, 3, update_epoch_batch_itr=True)
    resumed = batches_by_epoch(2, 3, update_epoch_batch_itr=True)
    assert resumed == {epoch: whole[epoch] for epoch in (2, 3)}
    groups = [sorted(map(sorted, whole[epoch])) for epoch in (1, 2)]
    assert groups[0] != groups[1]


def iterators(processes: int, **how: Any) -> list[Any]:
    """One for each process, at the beginning of an epoch of 13 batches."""
    task = FairseqTask(Namespace())
    how = {"max_sentences": 4, "seed": 3, "num_shards": processes, "disable_iterator_cache": True, **how}
    return [task.get_batch_iterator(dataset(), shard_id=i, **how) for i in range(processes)]


def rest(iterator: Any, count: int | None = None) -> list[list[int]]:
    """The next *count* batches of one process, or those that are left; a dummy batch is none."""
    found = itertools.islice(iterator.next_epoch_itr(), count)
    return [batch["id"].tolist() for batch in found if batch]


@pytest.mark.parametrize(("then", "had", "now"), [(1, 6, 2), (2, 3, 1), (2, 3, 3), (1, 12, 2), (4, 2, 2)])
def test_another_number_of_processes_resumes_at_the_next_batch(then: int, had: int, now: int) -> None:
    before = iterators(then)
    seen = [batch for iterator in before for batch in rest(iterator, had)]
    state = before[0].state_dict()
    after = iterators(now)
    for iterator in after:
        iterator.load_state_dict(dict(state))
    left = [batch for iterator in after for batch in rest(iterator)]
    sentences = sorted(i for batch in seen + left for i in batch)
    assert sentences == list(range(50))


def test_batches_that_do_not_divide_are_repeated_once(caplog: pytest.LogCaptureFixture) -> None:
    (before,) = iterators(1)
    seen = rest(before, 5)
    after = iterators(2)
    for iterator in after:
        iterator.load_state_dict(before.state_dict())
    left = [batch for iterator in after for batch in rest(iterator)]
    assert [batch for batch in left if batch in seen] == seen[4:]
    assert len(left) + len(seen) == 13 + 1
    assert (
        "checkpoint saved mid-epoch with 1 processes, resuming with 2: skipping the first 5 batches, "
        "except 1 that are repeated"
    ) in caplog.text


def test_the_same_number_of_processes_and_old_checkpoints_resume_as_in_fairseq(
    caplog: pytest.LogCaptureFixture,
) -> None:
    whole = rest(iterators(2)[1])
    for drop in ((), ("num_shards",)):
        before, after = iterators(2)[1], iterators(2)[1]
        rest(before, 3)
        after.load_state_dict({k: v for k, v in before.state_dict().items() if k not in drop})
        assert rest(after) == whole[3:]
    assert not [record for record in caplog.records if record.name == "surface_fusion.compat.resume"]


@pytest.mark.parametrize(
    "error, advice",
    [
        (
            ValueError("loaded state dict contains a parameter group"),
            "add --reset-optimizer",
        ),
        (KeyError("best"), "first.pt has no 'best' .* add --reset-lr-scheduler"),
    ],
    ids=["optimizer", "schedule"],
)
def test_mismatched_state_is_reported_with_the_flag_to_add(error, advice):
    def load_checkpoint(trainer, filename, **kwargs):
        raise error

    with pytest.raises(SurfaceFusionError, match=advice):
        with_advice_on_resets(load_checkpoint, None, "first.pt", reset_optimizer=False)


@pytest.mark.slow
@pytest.mark.parametrize("lr_patience", [0, 1])
def test_a_plateau_is_detected_across_a_resume(data: Path, tmp_path: Path, lr_patience: int) -> None:
    """Each epoch is worse than the first by this threshold, so that the learning rate goes down."""
    flags = ("--lr-scheduler", "reduce_lr_on_plateau", "--lr-shrink", 0.5, "--lr-threshold", 0.9)
    flags += ("--lr-patience", lr_patience, "--no-epoch-checkpoints")

    def train(folder: str, epochs: int) -> Any:
        argv = ("train", data, *TRAIN, *flags, "--max-epoch", epochs, "--save-dir", tmp_path / folder)
        assert main([*map(str, argv)]) == 0
        return torch.load(tmp_path / folder / "checkpoint_last.pt")

    for epochs in range(1, 5):
        parts = train("parts", epochs)
    whole = train("whole", 4)
    schedules = [state["optimizer_history"][-1]["lr_scheduler_state"] for state in (parts, whole)]
    assert schedules[0] == schedules[1]
    rates = [state["last_optimizer_state"]["param_groups"][0]["lr"] for state in (parts, whole)]
    assert rates[0] == rates[1] == (0.005 / 4 if lr_patience == 0 else 0.005 / 2)
    for name, value in whole["model"].items():
        assert value.equal(parts["model"][name]), name


def test_other_errors_are_not_changed():
    def load_checkpoint(trainer, filename):
        raise ValueError("something else")

    with pytest.raises(ValueError, match="something else"):
        with_advice_on_resets(load_checkpoint, None, "first.pt")
