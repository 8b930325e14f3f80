"""A training step on packed rows: gradients in the flat buffer, and CUDA graphs.

Also tests ``packed/batch.py``.
"""

import gc
from typing import Any

import pytest
import torch
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from torch import Tensor, nn

from surface_fusion.encoder_fusion import methods
from surface_fusion.packed import step as module
from surface_fusion.packed.batch import tokens_of
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.step import PackedStep
from surface_fusion.packed.transformer import PackedTransformer
from tests.helpers.interpreter import INTERPRETED
from tests.helpers.tiny import batch, build, shaken

DTYPE = torch.float64
HARD = ("--surfacefusion", "att", "--sf-gate", "0.8")
TASK = build(*HARD)[1]
SAMPLES = [batch((5, 7, 3), (6, 4, 5), extra_src=1, seed=i) for i in range(2)]


def step_of(model: Any, ignore_prefix_size: int = 0) -> PackedStep:
    flat = FlatParameters.of(p for p in model.parameters() if p.requires_grad)
    return PackedStep(PackedTransformer(model, flat), 0.1, ignore_prefix_size)


@pytest.fixture
def model() -> Any:
    return shaken(*HARD).to(DTYPE).train()


def reference(model: Any, sample: dict[str, Any]) -> tuple[Tensor, dict[str, Any]]:
    loss, _, logged = LabelSmoothedCrossEntropyCriterion(TASK, False, 0.1)(model, sample)
    return loss, logged


def gradients(model: Any, *scaled: tuple[float, dict[str, Any]]) -> dict[str, Tensor]:
    """Of fairseq's loss, summed over samples, by the modules."""
    model.zero_grad()
    for scale, sample in scaled:
        (scale * reference(model, sample)[0]).backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.requires_grad}


def assert_gradients(model: nn.Module, expected: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name], rtol=1e-4, atol=2e-5, msg=name)


def test_backward_adds_to_the_flat_buffer(model: Any) -> None:
    expected = gradients(model, (3.0, SAMPLES[0]), (0.5, SAMPLES[1]))
    step = step_of(model)
    flat = step.packed.flat
    flat.zero_grad()
    for scale, sample in ((3.0, SAMPLES[0]), (0.5, SAMPLES[1])):
        losses = step.train(sample)
        loss, logged = reference(model, sample)
        torch.testing.assert_close(losses.loss, loss, rtol=1e-6, atol=0)
        torch.testing.assert_close(losses.nll, logged["nll_loss"], rtol=1e-6, atol=0)
        (scale * losses.loss).backward()
    assert flat.needs_average  # to be averaged over the processes
    assert_gradients(model, expected)


@pytest.mark.parametrize("last", [True, False])
def test_processes_average_the_gradient_after_the_last_backward(
    last: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = shaken(*HARD, "--encoder-normalize-before").to(DTYPE).train()
    step = step_of(model)
    flat: Any = step.packed.flat
    flat.zero_grad()
    averaged: list[Tensor] = []
    monkeypatch.setattr(module.dist, "is_initialized", lambda: True)
    monkeypatch.setattr(module, "get_data_parallel_group", lambda: None)
    flat.launch_average = lambda group: averaged.append(flat.grad.clone())
    step.train(SAMPLES[0], last_of_update=last).loss.backward()
    assert len(averaged) == last
    assert all(gradient.equal(flat.grad) and gradient.any() for gradient in averaged)


def test_a_loss_of_zero_gives_a_gradient_of_zero(model: Any) -> None:
    """fairseq's dummy batches: ``loss *= 0``, in place, then backward as in the other processes."""
    step = step_of(model)
    step.packed.flat.zero_grad()
    loss = step.train(SAMPLES[0]).loss
    loss *= 0
    loss.backward()
    assert step.packed.flat.needs_average
    assert not step.packed.flat.grad.any()


def test_evaluation_draws_no_random_numbers_and_keeps_the_gradient(model: Any) -> None:
    dropped = shaken(*HARD, "--dropout", "0.5").to(DTYPE)
    step = step_of(dropped)
    step.packed.flat.grad.fill_(1)
    before = torch.get_rng_state()
    got = step.evaluate(SAMPLES[0])
    assert torch.get_rng_state().equal(before)
    assert not got.loss.requires_grad and step.packed.flat.grad.eq(1).all()
    expected, _ = reference(model.eval(), SAMPLES[0])
    torch.testing.assert_close(got.loss, expected, rtol=1e-6, atol=0)
    assert not step.train(SAMPLES[0]).loss.isclose(expected)  # dropout is back


def test_ignored_prefix_equals_fairseqs_loss(model: Any) -> None:
    sample = SAMPLES[0]
    expected = LabelSmoothedCrossEntropyCriterion(TASK, False, 0.1, ignore_prefix_size=2)(model, sample)[0]
    torch.testing.assert_close(step_of(model, 2).train(sample).loss, expected, rtol=1e-6, atol=0)


def test_backward_frees_the_activations(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    step = step_of(model)
    losses, backward = step.forward(module.pack(*tokens_of(SAMPLES[0]), step.padding_idx))
    assert not any(x.requires_grad for x in losses)
    backward(torch.ones_like(losses.loss))
    with pytest.raises(IndexError):  # the graph is freed
        backward(torch.ones_like(losses.loss))


# CUDA graphs

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="needs a GPU")
TOLERANCE = {torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 6e-2}


def moved(sample: Any, device: str) -> Any:
    if isinstance(sample, dict):
        return {name: moved(value, device) for name, value in sample.items()}
    return sample.to(device) if isinstance(sample, Tensor) else sample


FUSED = {name: (*HARD, "--encoder-fusion", name, "--ta-dropout", "0") for name in methods()}
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
MODELS = {
    "surface": HARD,
    **FUSED,
    **{f"{name} pre-norm": (*FUSED[name], *PRE_NORM) for name in ("dlcl", "dense", "fine-grained")},
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize(
    ("device", "dtype"),
    [("cpu", torch.float32), *(pytest.param("cuda", dtype, marks=needs_gpu) for dtype in TOLERANCE)],
    ids=str,
)
def test_several_batches_equal_the_modules(device: str, dtype: torch.dtype, name: str) -> None:
    """On a GPU the second and third take the first one's graph.

    The reference has the weights rounded to *dtype*, so that their rounding is not counted as an error.
    """
    lengths = [((9, 14, 6) * 20, (8, 12, 11) * 20), ((5, 7, 3) * 20, (6, 4, 5) * 20), ((9,) * 30, (13,) * 30)]
    model = shaken(*MODELS[name]).train()
    exact = shaken(*MODELS[name]).to(dtype).float().train()
    step = step_of(model.to(device, dtype))
    for src, tgt in lengths:
        sample = batch(src, tgt)
        expected = gradients(exact, (1.0, sample))
        loss, _ = reference(exact, sample)
        step.packed.flat.zero_grad()
        got = step.train(moved(sample, device)).loss
        (got * 0.125).backward()
        tolerance = TOLERANCE[dtype]
        torch.testing.assert_close(got.detach().cpu(), loss.detach(), rtol=tolerance, atol=0)
        total = torch.stack([want.norm() for want in expected.values()]).norm()
        for key, parameter in model.named_parameters():
            if key not in expected:
                continue  # frozen
            want = expected[key]
            error = (parameter.grad.cpu().float() / 0.125 - want).norm()
            assert error <= 4 * tolerance * (want.norm() + 0.02 * total), (
                key
            )  # some are zero but for rounding
    if device == "cuda":
        assert step._graphs is not None and len(step._graphs._captured) == 1


@needs_gpu
def test_graphs_draw_new_dropout_masks_that_follow_the_seed() -> None:
    model = shaken(*HARD, "--dropout", "0.3", "--attention-dropout", "0.3").cuda().train()
    step = step_of(model)
    sample = moved(SAMPLES[0], "cuda")
    step.train(sample).loss.backward()

    def losses(seed: int) -> list[float]:
        torch.manual_seed(seed)
        return [step.train(sample).loss.item() for _ in range(2)]

    first = losses(1)
    assert first[0] != first[1]
    assert first == losses(1) != losses(2)


@needs_gpu
def test_garbage_is_not_collected_during_a_capture() -> None:
    """Another model's graphs, freed in between, would invalidate it."""
    thresholds = gc.get_threshold()
    gc.set_threshold(1_000_000)
    try:
        old = step_of(shaken(*HARD).cuda().train())
        old.train(moved(SAMPLES[0], "cuda")).loss.backward()
        garbage: list[Any] = [old._graphs]
        garbage.append(garbage)
        del old, garbage
        step = step_of(shaken(*HARD).cuda().train())
        losses = step.losses

        def with_garbage(*given: Any) -> Any:
            if torch.cuda.is_current_stream_capturing():
                gc.set_threshold(1, 1, 1)
                _ = [[i] for i in range(1000)]
                gc.set_threshold(1_000_000)
            return losses(*given)

        step.losses = with_garbage  # type: ignore[method-assign]
        step.train(moved(SAMPLES[0], "cuda")).loss.backward()
        assert step.packed.flat.grad.any() and gc.isenabled()
    finally:
        gc.set_threshold(*thresholds)
