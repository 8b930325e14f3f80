"""LayerDrop that keeps depth: which layers are dropped, and what replaces them."""

from collections.abc import Iterator

import pytest
import torch
from fairseq.modules import LayerDropModuleList
from torch import nn

from surface_fusion.modules.layerdrop import DepthKeepingLayerDrop, skip_decoder_layer, skip_encoder_layer


def lists(p: float, layers: int = 12) -> Iterator[nn.ModuleList]:
    """fairseq's list and ours over the same layers."""
    theirs = LayerDropModuleList(p, [nn.Identity() for _ in range(layers)])
    yield theirs
    yield DepthKeepingLayerDrop(theirs, skip_encoder_layer)


@pytest.mark.parametrize("p", [0.0, 0.2, 0.5, 0.9, 1.0])
def test_the_layers_that_run_are_those_of_fairseq_under_one_seed(p: float) -> None:
    theirs, mine = lists(p)
    for seed in range(20):
        torch.manual_seed(seed)
        run = [id(layer) for layer in theirs]
        theirs_next = torch.rand(1)
        torch.manual_seed(seed)
        depths = list(mine)
        assert torch.equal(torch.rand(1), theirs_next), "as many random numbers are drawn"
        assert [id(layer) for layer in depths if layer is not skip_encoder_layer] == run
        assert len(depths) == 12
        for depth, layer in enumerate(depths):
            assert layer is skip_encoder_layer or layer is mine[depth]


def test_every_layer_runs_in_evaluation() -> None:
    theirs, mine = lists(1.0)
    mine.eval()
    assert list(mine) == [theirs[i] for i in range(12)]


def test_names_of_parameters_are_those_of_fairseq() -> None:
    theirs = LayerDropModuleList(0.5, [nn.Linear(2, 2) for _ in range(3)])
    mine = DepthKeepingLayerDrop(theirs, skip_encoder_layer)
    assert list(mine.state_dict()) == list(theirs.state_dict())
    assert mine.p == 0.5


def test_a_dropped_layer_returns_its_input() -> None:
    x = torch.randn(2, 3)
    assert skip_encoder_layer(x, encoder_padding_mask=None) is x
    out, attn, state = skip_decoder_layer(x, None, None, {}, self_attn_mask=None, need_attn=True)
    assert out is x and attn is None and state is None
