"""A step that was launched before the norm was known is the step; none, where the norm is not finite."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.optim import MemoryEfficientFP16Optimizer
from fairseq.tasks import FairseqTask
from test_optimizer import HERE, build, give, gradients, network, wrapped
from torch import Tensor

from surface_fusion.early_step import begin_step

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


class Training:
    """What of fairseq's trainer takes part, with a gradient that was computed on a GPU."""

    is_fsdp = False

    def __init__(self, dtype: torch.dtype, early: bool, **cfg: Any) -> None:
        self.model = network(dtype)
        half = dtype != torch.float32
        self.optimizer = (
            wrapped(MemoryEfficientFP16Optimizer, self.model, 5, **cfg) if half else build(self.model, **cfg)
        )
        self.flat_adam = self.optimizer.wrapped_optimizer if half else self.optimizer
        self.task: Any = FairseqTask(None)
        self.early = early
        self.begun: list[bool] = []

    def clip_grad_norm(self, clip_norm: float) -> Tensor:
        self.begun.append(self.flat_adam.optimizer._begun)
        norm: Tensor = self.optimizer.clip_grad_norm(clip_norm)
        return norm

    def update(self, step: int, max_norm: float, scale: float = 1.0) -> float:
        """The norm; infinite where nothing was learnt."""
        loss_scale = getattr(getattr(self.optimizer, "scaler", None), "loss_scale", 1.0)
        self.optimizer.zero_grad()
        give(self.model, gradients(self.model, step, scale * loss_scale))
        flat = self.flat_adam.flat
        norm = flat.grad_norm()
        flat._norm = norm, norm.cpu(), SimpleNamespace(synchronize=lambda: None)
        flat.local_only = self.early
        self.optimizer.multiply_grads(0.3)
        try:
            norm = begin_step(Training.clip_grad_norm, self, max_norm)
        except OverflowError:
            self.optimizer.zero_grad()
            return torch.inf
        if not norm.isfinite():
            return torch.inf
        self.task.optimizer_step(self.optimizer, self.model, step)
        self.optimizer.set_lr(0.01 / (1 + step % 7))
        return float(norm)

    @property
    def state(self) -> list[Tensor]:
        state = self.flat_adam.optimizer.state_dict()["state"]
        return [
            *(param.detach().float() for param in self.model.parameters()),
            *(torch.as_tensor(value).float() for one in state.values() for value in one.values()),
        ]


def assert_same(one: Training, other: Training, rounding: float = 0.0) -> None:
    for ours, theirs in zip(one.state, other.state, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=rounding or 2e-6, atol=rounding or 1e-7)


@pytest.mark.parametrize("max_norm", [0.0, 0.5, 50.0])
@pytest.mark.parametrize("dtype", DTYPES)
def test_it_is_the_same_step(dtype: torch.dtype, max_norm: float) -> None:
    early, late = (Training(dtype, how) for how in (True, False))
    for step in range(12):
        assert early.update(step, max_norm) == late.update(step, max_norm)
    assert early.begun == [True] * 12 and late.begun == [False] * 12
    # A factor's last bit is the device's; in fp16 and bf16 now and then a weight's, too.
    assert_same(early, late, 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_nothing_changes_where_the_norm_is_not_finite(dtype: torch.dtype, bad: float) -> None:
    early, late = (Training(dtype, how) for how in (True, False))
    for step in range(6):
        before = [value.clone() for value in early.state]
        found = [training.update(step, 0.5, bad if step in (0, 3) else 1.0) for training in (early, late)]
        assert found[0] == found[1]
        if step == 3:
            assert found[0] == torch.inf
            assert all(one.equal(other) for one, other in zip(before, early.state, strict=True))
    assert early.begun == [True] * 6
    assert_same(early, late, 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps)


def test_whose_step_is_not_begun() -> None:
    """A task that does not step each time, a plain optimizer, FSDP, a gradient that is not here yet."""

    class Patient(FairseqTask):
        def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
            if update_num % 2:
                optimizer.step()

    trainings = [Training(torch.float16, True) for _ in range(3)]
    trainings[0].task = Patient(None)
    trainings[1].is_fsdp = True
    trainings[2].flat_adam.flat.norm_on_device = lambda: None
    trainings.append(Training(torch.float16, True, sf_plain=True))
    for training in trainings:
        before = training.model[0].weight.clone()
        training.update(0, 0.5)
        assert training.begun == [False]
        assert training.model[0].weight.equal(before) == (training is trainings[0])


def test_other_optimizers_are_left_alone() -> None:
    asked: list[float] = []
    optimizer = SimpleNamespace(clip_grad_norm=lambda norm: asked.append(norm) or torch.tensor(2.0))
    trainer = SimpleNamespace(optimizer=optimizer, task=FairseqTask(None), is_fsdp=False)
    assert begin_step(lambda trainer, norm: trainer.optimizer.clip_grad_norm(norm), trainer, 3.0) == 2
    assert asked == [3.0]


@pytest.mark.skipif(HERE != "cuda", reason="needs a GPU")
def test_a_gpu_is_not_waited_for() -> None:
    training = Training(torch.float16, True)
    for step in range(3):
        training.update(step, 0.5)
    training.flat_adam.flat.local_only = True
    torch.cuda.set_sync_debug_mode("error")
    try:
        training.flat_adam.begin_step(0.3, 0.5, 0.0)
    finally:
        torch.cuda.set_sync_debug_mode("default")
