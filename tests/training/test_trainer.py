"""The trainer of SurfaceFusion models, in real trainings on a CPU in one and two processes."""

import os
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.trainer import Trainer
from fairseq.utils import set_torch_seed

from surface_fusion.training.cached_config import CachedConfig
from surface_fusion.training.memory_check import run_longest_batch
from tests.helpers import warm_processes
from tests.helpers.trainers import PACKED, batches_of, build_trainer


def test_settings_of_trainer_task_and_schedule_are_cached(data: Path) -> None:
    trainer = build_trainer(data)
    _ = trainer.lr_scheduler
    sections = (trainer.cfg, trainer.cfg.common, trainer.cfg.dataset, trainer.task.cfg)
    assert all(type(section) is CachedConfig for section in (*sections, trainer.lr_scheduler.cfg))


def test_the_seed_of_an_update_is_fairseqs(data: Path) -> None:
    trainer = build_trainer(data, "--seed", 5)
    trainer.set_num_updates(3)
    set_torch_seed(5 + 3)
    expected = torch.rand(5)
    trainer._set_seed()
    assert torch.rand(5).equal(expected)


def test_the_longest_batch_runs_without_an_effect(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    trainer = build_trainer(data, "--update-freq", 2)
    with caplog.at_level("INFO", "surface_fusion"):
        sizes = [sample["target"].numel() for samples in batches_of(trainer) for sample in samples]
        assert "longest batch" not in caplog.text  # only on a GPU
        run_longest_batch(trainer, trainer._train_iterator)
    [line] = [text for text in caplog.messages if "longest batch" in text]
    rows, columns = map(int, line.split("(")[1].split(" target")[0].split(" x "))
    assert rows * columns == max(sizes)
    assert trainer.get_num_updates() == 0
    assert not any(p.grad is not None and p.grad.abs().sum() > 0 for p in trainer.model.parameters())


def test_dummy_batches_of_the_last_update_are_left_out(data: Path) -> None:
    """In fairseq, a dummy that follows a real batch makes the whole update count as none."""
    losses, sizes = [], []
    for dummies in ([], [{}]):
        trainer = build_trainer(data, *PACKED)
        samples = next(iter(batches_of(trainer)))
        logged = trainer.train_step([*samples, *dummies])
        losses.append(logged["loss"])
        sizes.append(logged["sample_size"])
    assert losses[0] == losses[1] and sizes[0] == sizes[1] > 0


def test_an_update_of_dummy_batches_alone_equals_fairseqs(data: Path) -> None:
    trainer = build_trainer(data, *PACKED)
    next(iter(batches_of(trainer)))
    before = [p.clone() for p in trainer.model.parameters()]
    logged = trainer.train_step([{}])
    assert logged["sample_size"] == 0
    assert all(a.equal(b) for a, b in zip(before, trainer.model.parameters(), strict=True))


def test_modules_that_are_added_between_updates_are_trained_and_evaluated(data: Path) -> None:
    trainer = build_trainer(data)
    first, second, *_ = batches_of(trainer)
    trainer.train_step(first)
    trainer.get_model().eval()
    adapter = trainer.get_model().encoder.adapter = torch.nn.Dropout(0.5)
    trainer.get_model().eval()
    assert not adapter.training
    trainer.train_step(second)
    assert adapter.training


# -- two processes ----------------------------------------------------------------------------------

CASES = ("equal", "other gradient", "overflow in one process", "fairseq's sums", "validation")


@pytest.fixture(scope="module")
def results(data: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Any]]]:
    """What happened in each of two processes, by case."""
    folder = tmp_path_factory.mktemp("two_processes")
    warm_processes.in_two(worker, str(folder), str(data))
    by_rank = [torch.load(folder / f"{rank}.pt", weights_only=False) for rank in range(2)]
    return {case: [result[case] for result in by_rank] for case in CASES}


def worker(rank: int, folder: str, data: str) -> None:
    os.chdir(folder)
    os.makedirs("checkpoints", exist_ok=True)  # fairseq saves there when a training fails
    torch.set_num_threads(1)
    torch.Tensor.cuda = lambda self, *_: self  # type: ignore[method-assign]  # where fairseq wants a norm of 0
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    torch.save({case: train_with_norms(rank, data, case) for case in CASES}, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


def train_with_norms(rank: int, data: str, case: str) -> dict[str, Any]:
    """Four updates with fairseq's buffer of gradient norms, which it has on GPUs only."""
    flags = ("--distributed-world-size", 2, "--distributed-rank", rank, "--distributed-backend", "gloo")
    trainer = build_trainer(Path(data), *PACKED, *flags, "--ddp-backend", "no_c10d")
    trainer._grad_norm_buf = torch.zeros(2, dtype=torch.double)
    result: dict[str, Any] = {"errors": [], "norms": [], "compared at once": []}
    clip, check = trainer.clip_grad_norm, Trainer._check_grad_norms

    def clip_grad_norm(clip_norm: float) -> Any:
        norm = clip(clip_norm)
        result["norms"].append(float(norm))
        second = rank == 1 and len(result["norms"]) == 2
        if second and case == "other gradient":
            return norm + 1
        if second and case == "overflow in one process":
            raise OverflowError("minimum not reached")
        return norm

    def check_grad_norms(self: Any, norm: Any) -> None:
        result["compared at once"].append(float(norm))
        check(self, norm)

    trainer.clip_grad_norm = clip_grad_norm
    if case == "fairseq's sums":
        trainer._statistics.take = lambda outputs: None
    batches = iter(batches_of(trainer))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Trainer, "_check_grad_norms", check_grad_norms)
        for _ in range(4):
            try:
                trainer.train_step(next(batches))
            except FloatingPointError as error:
                result["errors"].append((len(result["norms"]), str(error)))
                break
            if case == "validation":
                valid = trainer.get_valid_iterator("valid").next_epoch_itr(shuffle=False)
                result["loss"] = trainer.valid_step(next(iter(valid)))["loss"]
                result["unchecked"] = trainer._unchecked_norm
    return result


@pytest.mark.slow
@pytest.mark.parametrize("case", ["equal", "validation"])
def test_equal_norms_raise_nothing(results: dict[str, list[dict[str, Any]]], case: str) -> None:
    first, second = results[case]
    assert first["errors"] == second["errors"] == []
    assert first["norms"] == second["norms"] and len(first["norms"]) == 4
    assert first["compared at once"] == []  # they were compared with the statistics of the next update


@pytest.mark.slow
def test_different_norms_are_reported_before_the_weights_change_again(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for result in results["other gradient"]:
        [(updates, message)] = result["errors"]
        assert updates == 3
        assert "gradient norms of the previous update differ between processes" in message


@pytest.mark.slow
def test_an_overflow_in_one_process_only_is_reported(results: dict[str, list[dict[str, Any]]]) -> None:
    for result in results["overflow in one process"]:
        [(_, message)] = result["errors"]
        assert "-1.0" in message


@pytest.mark.slow
def test_without_overlapped_statistics_fairseq_compares_at_once(
    results: dict[str, list[dict[str, Any]]],
) -> None:
    for result in results["fairseq's sums"]:
        assert result["errors"] == [] and result["compared at once"] == result["norms"]


@pytest.mark.slow
def test_a_validation_leaves_the_norm_for_the_next_update(results: dict[str, list[dict[str, Any]]]) -> None:
    first, second = results["validation"]
    assert first["loss"] == second["loss"] > 0
    assert first["unchecked"] == second["unchecked"] == first["norms"][-1]


def test_statistics_are_expected_only_where_fairseq_sums_them(data: Path) -> None:
    trainer = build_trainer(data, *PACKED)
    trainer._statistics.expect = lambda *_: pytest.fail("one process has nothing to sum")
    trainer.train_step(next(iter(batches_of(trainer))))
    assert distributed_utils.get_data_parallel_world_size() == 1
    other = build_trainer(data)
    assert other._statistics is None
    other.train_step(next(iter(batches_of(other))))


# -- tasks with steps of their own ------------------------------------------------------------------


def test_tasks_with_their_own_train_step_are_recognised(data: Path) -> None:
    trainer = build_trainer(data)
    assert trainer._runs_fairseqs_steps()
    task = type(trainer.task)

    class Clamping(task):  # type: ignore[misc, valid-type]
        def optimizer_step(self, *args: Any, **kwargs: Any) -> None:
            super().optimizer_step(*args, **kwargs)

    class Augmenting(task):  # type: ignore[misc, valid-type]
        def train_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().train_step(*args, **kwargs)

    for kind in (Clamping, Augmenting):
        trainer.task = kind.__new__(kind)
        assert not trainer._runs_fairseqs_steps()
    trainer.task = Namespace(train_step=print, optimizer_step=print)
    assert not trainer._runs_fairseqs_steps()
