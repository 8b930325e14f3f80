"""A prefetched forward is used only if a run would give the same now."""

import logging
from typing import Any

import pytest
import torch
from torch import Tensor

from surface_fusion.optim.flat_adam import FlatAdamUpdate
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.forward_prefetch import MISSES, ForwardPrefetch
from tests.helpers.tiny import batch, shaken

HERE = "cuda" if torch.cuda.is_available() else "cpu"
TOKENS = (torch.tensor([1, 2]), torch.tensor([3]))


@pytest.fixture
def model() -> Any:
    return shaken("--surfacefusion", "att", "--sf-gate", "0.8").to(HERE)


@pytest.fixture
def flat(model: Any) -> FlatParameters:
    return FlatParameters.of(model.parameters())


@pytest.fixture
def prefetch(flat: FlatParameters) -> ForwardPrefetch[list[float]]:
    return ForwardPrefetch(flat)


def draw() -> list[float]:
    """A forward that drops something."""
    return torch.rand(3, device=HERE).tolist()


def seeded(seed: int) -> list[float]:
    torch.manual_seed(seed)
    return draw()


def test_a_prefetched_forward_equals_a_run_under_its_seed(
    prefetch: ForwardPrefetch[Any],
) -> None:
    expected, then = seeded(5), draw()
    torch.manual_seed(1)
    prefetch.launch(TOKENS, 5, draw)
    others = draw()
    assert others == seeded(1)  # nothing else is drawn otherwise
    torch.manual_seed(5)
    assert prefetch.take(TOKENS) == expected
    assert draw() == then


def test_a_prefetched_forward_is_taken_once(prefetch: ForwardPrefetch[Any]) -> None:
    prefetch.launch(TOKENS, 5, draw)
    torch.manual_seed(5)
    assert prefetch.take(TOKENS) is not None
    torch.manual_seed(5)
    assert prefetch.take(TOKENS) is None


def test_other_token_tensors_discard_the_prefetched_forward(prefetch: ForwardPrefetch[Any]) -> None:
    for other in ((TOKENS[0], TOKENS[1].clone()), (TOKENS[0].clone(), TOKENS[1])):
        prefetch.launch(TOKENS, 5, draw)
        torch.manual_seed(5)
        assert prefetch.take(other) is None
        assert prefetch.take(TOKENS) is None  # another batch has come: it is forgotten


def test_another_random_state_discards_the_prefetched_forward(prefetch: ForwardPrefetch[Any]) -> None:
    prefetch.launch(TOKENS, 5, draw)
    torch.manual_seed(6)
    assert prefetch.take(TOKENS) is None
    prefetch.launch(TOKENS, 5, draw)
    expected = seeded(5)
    assert prefetch.take(TOKENS) is None
    assert draw() != expected  # the generator is left alone


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_an_optimizer_step_discards_the_prefetched_forward(dtype: torch.dtype, model: Any) -> None:
    """torch's fused kernel does not say so itself."""
    for plain in (True, False):
        optimizer = FlatAdamUpdate(model.to(dtype).parameters(), 0.1, (0.9, 0.9), 1e-8, 0.0, plain=plain)
        prefetch: ForwardPrefetch[Any] = ForwardPrefetch(optimizer.flat)
        prefetch.launch(TOKENS, 5, draw)
        optimizer.flat.grad.fill_(1.0)
        optimizer.step()
        torch.manual_seed(5)
        assert prefetch.take(TOKENS) is None


@torch.no_grad()
def test_changed_parameters_discard_the_prefetched_forward(
    prefetch: ForwardPrefetch[Any], flat: FlatParameters, model: Any
) -> None:
    one: Tensor = next(model.parameters())
    changes = (
        lambda: flat.data.mul_(2),
        lambda: one.clamp_(max=0.1),  # a task
        lambda: model.load_state_dict(model.state_dict()),
    )
    for change in changes:
        prefetch.launch(TOKENS, 5, draw)
        change()
        torch.manual_seed(5)
        assert prefetch.take(TOKENS) is None
    prefetch.launch(TOKENS, 5, draw)
    flat.zero_grad()
    model(**{name: value.to(HERE) for name, value in batch()["net_input"].items()})
    torch.manual_seed(5)
    assert prefetch.take(TOKENS) is not None


def test_changed_tokens_discard_the_prefetched_forward(prefetch: ForwardPrefetch[Any]) -> None:
    tokens = tuple(part.clone() for part in TOKENS)
    prefetch.launch(tokens, 5, draw)
    tokens[1].fill_(7)
    torch.manual_seed(5)
    assert prefetch.take(tokens) is None


def test_prefetching_stops_after_repeated_misses(
    prefetch: ForwardPrefetch[Any], caplog: pytest.LogCaptureFixture
) -> None:
    def use(fitting: bool) -> None:
        prefetch.launch(TOKENS, 5, draw)
        torch.manual_seed(5 if fitting else 6)
        assert (prefetch.take(TOKENS) is not None) == fitting

    for fitting in (*(False,) * (MISSES - 1), True, *(False,) * (MISSES - 1)):
        use(fitting)
        assert prefetch.useful
    with caplog.at_level(logging.INFO):
        assert not caplog.text
        use(False)
    assert not prefetch.useful
    assert "forward prefetch is off" in caplog.text


def test_forwards_that_are_never_taken_count_as_misses(prefetch: ForwardPrefetch[Any]) -> None:
    for _ in range(MISSES):
        assert prefetch.useful
        prefetch.launch(TOKENS, 5, draw)
    assert not prefetch.useful
    torch.manual_seed(5)
    assert prefetch.take(TOKENS) is not None and prefetch.useful  # the last was of use, after all


def test_an_error_restores_the_random_state(prefetch: ForwardPrefetch[Any]) -> None:
    def fail() -> Any:
        draw()
        raise torch.cuda.OutOfMemoryError("of memory")

    torch.manual_seed(1)
    prefetch.launch(TOKENS, 4, draw)
    with pytest.raises(torch.cuda.OutOfMemoryError):
        prefetch.launch(TOKENS, 5, fail)
    assert draw() == seeded(1)
    torch.manual_seed(4)
    assert prefetch.take(TOKENS) is None
    with pytest.raises(torch.cuda.OutOfMemoryError):
        prefetch.launch(TOKENS, 5, fail)
    assert not prefetch.useful  # as after any three for nothing
