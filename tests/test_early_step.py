"""A step that was launched before the norm was known is the step; none, where the norm is not finite."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.optim import MemoryEfficientFP16Optimizer
from fairseq.tasks import FairseqTask
from test_optimizer import HERE, build, give, gradients, network, wrapped
from torch import Tensor

from surface_fusion import early_step
from surface_fusion.early_step import begin_step, expect_step

DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True)
def fairseqs_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(early_step, "is_fairseqs_loop", lambda trainer: trainer.fairseqs)


class Training:
    """What of fairseq's trainer takes part, with a gradient that was computed on a GPU."""

    fairseqs = True

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
            norm = expect_step(lambda trainer: begin_step(Training.clip_grad_norm, trainer, max_norm), self)
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


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_step_that_is_not_begun_follows_one_that_did_not_come(dtype: torch.dtype) -> None:
    """And one that came."""
    early, late = (Training(dtype, how) for how in (True, False))
    for step in range(8):
        early.early = step % 3 != 1
        bad = torch.inf if step == 3 else 1.0
        assert early.update(step, 0.5, bad) == late.update(step, 0.5, bad)
    assert early.begun == [step % 3 != 1 for step in range(8)]
    assert_same(early, late, 0.0 if dtype == torch.float32 else torch.finfo(dtype).eps)


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_norm_of_almost_nothing_is_clipped_as_fairseq_does(dtype: torch.dtype) -> None:
    """To max_norm / norm in fp16, else to max_norm / (norm + 1e-6): up to half of it."""
    early, late = (Training(dtype, how, adam_eps=1e-8) for how in (True, False))
    small = 1e-3 if dtype == torch.float16 else 1e-6  # a loss scale of 128 is on it, too
    for step in range(3):
        assert early.update(step, 1e-7, small) == late.update(step, 1e-7, small)
    moments = [
        torch.cat(
            [state["exp_avg"].flatten() for state in one.flat_adam.optimizer.state_dict()["state"].values()]
        )
        for one in (early, late)
    ]
    assert moments[0].any()
    torch.testing.assert_close(moments[0], moments[1], rtol=1e-3, atol=0)


def test_one_step_was_begun_not_two() -> None:
    training = Training(torch.float32, True)
    training.update(0, 0.5)
    before = training.model[0].weight.clone()
    training.optimizer.step()
    assert not training.model[0].weight.equal(before)


def test_whose_step_is_not_begun() -> None:
    """Where something else is known to happen, of a plain optimizer, of a gradient that is not here yet."""
    trainings = [Training(torch.float16, True) for _ in range(4)]
    trainings[0].fairseqs = False
    trainings[1].flat_adam.flat.norm_on_device = lambda: None
    multiply = trainings[2].optimizer.multiply_grads
    trainings[2].optimizer.multiply_grads = lambda c: multiply(torch.tensor(c))
    trainings[3].flat_adam.multiply_grads(torch.tensor(1.0))
    trainings[3].optimizer.zero_grad = lambda: None
    trainings.append(Training(torch.float16, True, sf_plain=True))
    for training in trainings:
        before = training.model[0].weight.clone()
        training.update(0, 0.5)
        assert training.begun == [False]
        assert not training.model[0].weight.equal(before)


def test_one_step_follows_the_first_clipping_of_an_update() -> None:
    begun: list[float] = []
    optimizer = SimpleNamespace(begin_step=lambda factor, max_norm, margin: begun.append(max_norm))
    trainer: Any = SimpleNamespace(optimizer=optimizer, fairseqs=True)

    def clip_twice(trainer: Any) -> None:
        for max_norm in (1.0, 2.0):
            begin_step(lambda trainer, norm: torch.tensor(norm), trainer, max_norm)

    clip_twice(trainer)  # not in an update
    assert begun == []
    expect_step(clip_twice, trainer)
    clip_twice(trainer)
    assert begun == [1.0]


def test_no_step_follows_an_update_that_failed() -> None:
    trainer: Any = SimpleNamespace(fairseqs=True)

    def fail(trainer: Any) -> None:
        raise ValueError("before the norm")

    with pytest.raises(ValueError, match="before the norm"):
        expect_step(fail, trainer)
    assert not trainer.step_follows


@pytest.mark.parametrize("hooked", [False, True])
def test_a_step_that_is_somebody_elses_is_not_begun(hooked: bool) -> None:
    """Which leaves every second out, or looks at the gradient before."""
    training = Training(torch.float16, True)
    if hooked:
        training.flat_adam.optimizer.register_step_pre_hook(lambda optimizer, args, kwargs: None)
    else:
        step = training.optimizer.step
        training.optimizer.step = lambda: step()
    training.update(0, 0.5)
    assert training.begun == [False]


def test_other_optimizers_are_left_alone() -> None:
    asked: list[float] = []
    optimizer = SimpleNamespace(clip_grad_norm=lambda norm: asked.append(norm) or torch.tensor(2.0))
    trainer = SimpleNamespace(optimizer=optimizer, step_follows=True)
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
