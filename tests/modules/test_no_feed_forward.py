"""Layers without feed-forward sublayer, in full passes and token by token."""

from typing import Any

import pytest
import torch

from tests.helpers.tiny import SHARED, assert_incremental_equals_full, batch, gradients, log_probs, shaken

PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")


def muted(model: Any, stack: str) -> Any:
    """The oracle for pre-norm layers: feed-forward sublayers that add zero."""
    for layer in getattr(model, stack).layers:
        for parameter in layer.fc2.parameters():
            torch.nn.init.zeros_(parameter)
    return model


@pytest.mark.parametrize("stack", ["encoder", "decoder"])
@pytest.mark.parametrize("surface", [(), ("--surfacefusion", "att", "--sf-gate", "0.8")], ids=str)
def test_equals_a_feed_forward_that_adds_zero(stack: str, surface: tuple[str, ...]) -> None:
    full = muted(shaken(*PRE_NORM, SHARED, *surface), stack)
    bare = shaken(f"--no-{stack}-fnn", *PRE_NORM, SHARED, *surface)
    gone = {f"{stack}.layers.{i}.{name}" for i in range(2) for name in ("fc1", "fc2", "final_layer_norm")}
    names = {n for n, _ in full.named_parameters() if n.rpartition(".")[0] not in gone}
    assert {n for n, _ in bare.named_parameters()} == names
    bare.load_state_dict({n: x for n, x in full.state_dict().items() if n.rpartition(".")[0] not in gone})
    torch.testing.assert_close(log_probs(bare, batch()), log_probs(full, batch()))
    assert all(grad is not None for grad in gradients(bare, batch()).values())


@pytest.mark.parametrize("norm", [(), PRE_NORM], ids=["post-norm", "pre-norm"])
def test_token_by_token(norm: tuple[str, ...]) -> None:
    assert_incremental_equals_full(shaken("--no-encoder-fnn", "--no-decoder-fnn", *norm, SHARED))
