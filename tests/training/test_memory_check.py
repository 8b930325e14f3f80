"""The longest batch is tried before training, and one that does not fit is named (fs 2867)."""

from types import SimpleNamespace

import pytest
import torch

from surface_fusion import SurfaceFusionError
from surface_fusion.training.memory_check import run_longest_batch


class FakeTrainer:
    """The parts of fairseq's trainer that the check uses, with a limit of memory."""

    def __init__(self, sizes: list[int], limit: int) -> None:
        self.is_fsdp = False
        self.model = torch.nn.Linear(2, 2)
        self.criterion = self.optimizer = None
        self.cfg = SimpleNamespace(dataset=SimpleNamespace(max_tokens=100))
        self.seen: list[tuple[int, ...]] = []
        self.zeroed = 0
        batches = [[0, 1], [2, 3], [4]]
        self.iterator = SimpleNamespace(
            frozen_batches=batches,
            dataset=type(
                "Sizes", (), {"num_tokens": lambda _, i: sizes[i], "__getitem__": lambda _, i: sizes[i]}
            )(),
            collate_fn=lambda rows: {"net_input": {"prev_output_tokens": torch.zeros(len(rows), max(rows))}},
        )

        def train_step(sample, model, criterion, optimizer, update_num, ignore_grad):
            assert ignore_grad
            shape = tuple(sample["net_input"]["prev_output_tokens"].shape)
            self.seen.append(shape)
            if shape[0] * shape[1] > limit:
                raise torch.cuda.OutOfMemoryError("CUDA out of memory")

        self.task = SimpleNamespace(train_step=train_step)

    def get_num_updates(self) -> int:
        return 0

    def _prepare_sample(self, batch: dict) -> tuple[dict, bool]:
        return batch, False

    def zero_grad(self) -> None:
        self.zeroed += 1


def test_the_batch_with_the_most_padded_tokens_is_run() -> None:
    trainer = FakeTrainer([3, 5, 2, 7, 9], limit=100)  # padded: 10, 14, 9
    run_longest_batch(trainer, trainer.iterator)
    assert trainer.seen == [(2, 7)]
    assert trainer.zeroed == 1


def test_a_batch_that_does_not_fit_is_named() -> None:
    trainer = FakeTrainer([3, 5, 2, 7, 9], limit=13)
    with pytest.raises(
        SurfaceFusionError, match=r"longest batch \(2 x 7 target tokens\).*--max-tokens \(100\)"
    ):
        run_longest_batch(trainer, trainer.iterator)
    assert trainer.zeroed == 1


def test_an_iterator_without_a_list_of_batches_and_fsdp_are_skipped() -> None:
    trainer = FakeTrainer([3, 5, 2, 7, 9], limit=100)
    run_longest_batch(trainer, object())
    trainer.is_fsdp = True
    run_longest_batch(trainer, trainer.iterator)
    assert trainer.seen == []
