"""The longest batch is tried before training, and one that does not fit is named (fs 2867)."""

from types import SimpleNamespace

import pytest
import torch
from fairseq.trainer import Trainer

from surface_fusion import SurfaceFusionError


class FakeTrainer:
    """As much of fairseq's trainer as the trial of the longest batch touches."""

    def __init__(self, sizes: list[int], limit: int) -> None:
        self.tpu = self.is_fsdp = False
        self.fast_training = True
        self.model = torch.nn.Linear(2, 2)
        self.criterion = self.optimizer = None
        self.cfg = SimpleNamespace(dataset=SimpleNamespace(max_tokens=100))
        self.seen: list[tuple[int, ...]] = []
        self.zeroed = 0
        batches = [[0, 1], [2, 3], [4]]
        self.longest_batch_iterator = SimpleNamespace(
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

        self.task = SimpleNamespace(train_step=train_step, begin_epoch=lambda *_: None)
        self.quantizer = None

    def lr_step_begin_epoch(self, epoch: int) -> None:
        pass

    def get_model(self) -> torch.nn.Module:
        return self.model

    def get_num_updates(self) -> int:
        return 0

    def _prepare_sample(self, batch: dict) -> tuple[dict, bool]:
        return batch, False

    def zero_grad(self) -> None:
        self.zeroed += 1


def test_the_batch_with_the_most_padded_tokens_is_tried_once() -> None:
    trainer = FakeTrainer([3, 5, 2, 7, 9], limit=100)  # padded: 10, 14, 9
    Trainer.begin_epoch(trainer, 1)
    Trainer.begin_epoch(trainer, 2)
    assert trainer.seen == [(2, 7)]
    assert trainer.zeroed == 1


def test_a_batch_that_does_not_fit_is_named() -> None:
    trainer = FakeTrainer([3, 5, 2, 7, 9], limit=13)
    with pytest.raises(
        SurfaceFusionError, match=r"longest batch \(2 x 7 target tokens\).*--max-tokens \(100\)"
    ):
        Trainer.begin_epoch(trainer, 1)
    assert trainer.zeroed == 1
