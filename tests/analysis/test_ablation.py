"""A silenced layer has no weight in the fusion, and is back afterwards; the encoder runs whole."""

import pytest
import torch

from surface_fusion.analysis.ablation import ablate, silenced
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.errors import SurfaceFusionError
from tests.helpers.tiny import SHARED, batch, log_probs, shaken

FLAGS = ("--encoder-fusion-embedding", SHARED)


@pytest.mark.parametrize("name", ["transparent", "fine-grained"])
@pytest.mark.parametrize("state", [0, 1, 2])
def test_a_silenced_layer_of_layer_attention_has_no_weight(name: str, state: int) -> None:
    model = shaken("--encoder-fusion", name, *FLAGS)
    fusion = model.encoder.fusion
    states = [torch.randn(4, 1, 16) for _ in range(3)]
    whole = fusion(states)
    weight = fusion.layer_weights()
    weight = weight if weight.dim() == 3 else weight[..., None]
    seen = [fusion.embedding_norm(states[0]), *states[1:]]
    mixed = [sum(w[n] * seen[n] for n in range(3) if n != state) for w in weight]
    expected = torch.cat([fusion.layer_norm(m) for m in mixed], -1)
    with silenced(fusion, state):
        torch.testing.assert_close(fusion(states), expected)
    assert torch.equal(fusion(states), whole)


@pytest.mark.parametrize("name", ["average", "concat", "representation"])
def test_a_silenced_state_of_a_fusion_on_the_output_has_no_weight(name: str) -> None:
    model = shaken("--encoder-fusion", name, *FLAGS)
    fusion = model.encoder.fusion
    states = [torch.randn(4, 1, 16) for _ in range(3)]
    zeros = torch.zeros(4, 1, 16)
    alone = [fusion([x if n == m else zeros for m, x in enumerate(states)]) for n in range(3)]
    with silenced(fusion, 1):
        torch.testing.assert_close(fusion(states), alone[0] + alone[2])
    torch.testing.assert_close(fusion(states), sum(alone))


def test_silencing_a_layer_changes_the_probabilities() -> None:
    model = shaken("--encoder-fusion", "fine-grained", *FLAGS)
    whole = log_probs(model, batch())
    with silenced(model.encoder.fusion, 2):
        assert not torch.allclose(log_probs(model, batch()), whole)
    assert torch.equal(log_probs(model, batch()), whole)


@pytest.mark.parametrize("name", ["lstm", "dwatt"])
def test_methods_that_cannot_leave_out_a_layer_are_refused(name: str) -> None:
    model = shaken("--encoder-fusion", name, SHARED)
    with pytest.raises(SurfaceFusionError, match=f"--encoder-fusion {name} is none that can leave out"):
        ablate(Loaded(model, None, "test"), 1, None)
