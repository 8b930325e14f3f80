"""The longest batch runs before training, and an error names a batch that does not fit (fs 2867)."""

from pathlib import Path
from typing import Any

import pytest
import torch

from surface_fusion import SurfaceFusionError
from surface_fusion.training.memory_check import run_longest_batch
from tests.helpers.trainers import build_trainer

Shapes = list[tuple[int, int]]


@pytest.fixture
def trainer(data: Path) -> Any:
    return build_trainer(data)


@pytest.fixture
def shapes(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> Shapes:
    """Shapes of the target tokens of all batches that the trainer's task trains on."""
    seen: Shapes = []
    train_step = trainer.task.train_step

    def recorded(sample: Any, *args: Any) -> Any:
        seen.append(tuple(sample["target"].shape))
        return train_step(sample, *args)

    monkeypatch.setattr(trainer.task, "train_step", recorded)
    return seen


def gradient_is_zero(trainer: Any) -> bool:
    return not any(p.grad is not None and p.grad.any() for p in trainer.model.parameters())


def test_the_batch_with_the_most_padded_tokens_is_run(trainer: Any, shapes: Shapes) -> None:
    iterator = trainer.get_train_iterator(1)
    run_longest_batch(trainer, iterator)
    [(rows, columns)] = shapes
    sizes = [batch["target"].numel() for batch in iterator.next_epoch_itr(shuffle=False)]
    assert rows * columns == max(sizes) > min(sizes)
    assert gradient_is_zero(trainer) and trainer.get_num_updates() == 0


def test_a_batch_that_does_not_fit_is_named(trainer: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    train_step = trainer.task.train_step

    def fail(*args: Any) -> None:
        train_step(*args[:-1], ignore_grad=False)
        assert not gradient_is_zero(trainer)
        raise torch.cuda.OutOfMemoryError("CUDA out of memory")

    iterator = trainer.get_train_iterator(1)
    monkeypatch.setattr(trainer.task, "train_step", fail)
    with pytest.raises(
        SurfaceFusionError, match=r"longest batch \(\d+ x \d+ target tokens\).*--max-tokens \(400\)"
    ):
        run_longest_batch(trainer, iterator)
    assert gradient_is_zero(trainer)


def test_an_iterator_without_a_list_of_batches_and_fsdp_are_skipped(trainer: Any, shapes: Shapes) -> None:
    iterator = trainer.get_train_iterator(1)
    run_longest_batch(trainer, iterator.next_epoch_itr())
    trainer.cfg.distributed_training.ddp_backend = "fully_sharded"
    run_longest_batch(trainer, iterator)
    assert shapes == []
