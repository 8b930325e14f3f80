"""The weights that are drawn equal those that the model multiplies with.

Also tests ``analysis/loaded.py``.
"""

from typing import Any

import pytest
import torch

from surface_fusion.analysis.layers import layer_weights
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.errors import SurfaceFusionError
from tests.helpers.tiny import SHARED, batch, shaken


class OneBatch(Loaded):
    """A model with one batch for its data."""

    def batches(self, max_tokens: int = 4000) -> Any:
        yield batch()


def loaded(name: str, *flags: str) -> Loaded:
    return OneBatch(shaken("--encoder-fusion", name, SHARED, *flags), None, "test")


@pytest.mark.parametrize("name", ["transparent", "fine-grained"])
def test_layer_attention_has_weights_for_each_decoder_layer(name: str) -> None:
    model = loaded(name, "--encoder-fusion-embedding")
    (table,) = layer_weights(model)
    assert table.layers == ["Emb", "1", "2"] and table.columns == ["1", "2"]
    weight = model.model.encoder.fusion.weight.softmax(1)
    expected = weight if weight.dim() == 2 else weight.mean(2)
    torch.testing.assert_close(table.values, expected.t())
    torch.testing.assert_close(table.values.sum(0), torch.ones(2))


def test_without_the_embedding_layer_1_is_the_lowest() -> None:
    assert layer_weights(loaded("transparent"))[0].layers == ["1", "2"]
    assert layer_weights(loaded("average", "--encoder-fusion-embedding"))[0].layers == ["Emb", "1", "2"]


def test_dlcl_has_a_triangular_table_for_each_stack() -> None:
    model = loaded("dlcl")
    encoder, decoder = layer_weights(model)
    assert (encoder.name, decoder.name) == ("layers_encoder", "layers_decoder")
    assert encoder.columns == ["1", "2", "out"] and encoder.layers == ["Emb", "1", "2"]
    assert encoder.values.isnan().int().tolist() == [[0, 0, 0], [1, 0, 0], [1, 1, 0]]
    weight = model.model.encoder.combination.weight
    torch.testing.assert_close(encoder.values[:, 2], weight[3:])


def test_shares_of_concat_are_norms_of_its_weights() -> None:
    model = loaded("concat")
    (table,) = layer_weights(model)
    norms = torch.stack([w.square().sum().sqrt() for w in model.model.encoder.fusion.weight])
    torch.testing.assert_close(table.values[:, 0], norms / norms.sum())


@pytest.mark.parametrize("name", ["dwatt", "representation"])
def test_weights_are_averaged_over_the_positions_of_the_data(name: str) -> None:
    """Padding does not count."""
    model = loaded(name)
    encoder = model.model.encoder
    (table,) = layer_weights(model)
    sums, count = torch.zeros(2), 0
    net = batch()["net_input"]
    for tokens in net["src_tokens"]:
        tokens = tokens[tokens.ne(1)][None]
        states = encoder(tokens, None, return_all_hiddens=True)["encoder_states"][1:]
        if name == "dwatt":
            found = encoder.fusion.weights(states[-1])
        else:
            found = torch.cat([encoder.fusion.weigh(x) for x in states], -1)
        sums, count = sums + found.flatten(0, 1).sum(0), count + tokens.numel()
    torch.testing.assert_close(table.values[:, 0], sums / count, rtol=1e-4, atol=1e-5)


def test_a_method_without_layer_weights_is_refused() -> None:
    with pytest.raises(
        SurfaceFusionError, match="--encoder-fusion lstm is none that weighs layers; average, "
    ):
        layer_weights(loaded("lstm"))
    plain = OneBatch(shaken(SHARED), None, "test")
    with pytest.raises(SurfaceFusionError, match="the model has no --encoder-fusion that weighs layers"):
        layer_weights(plain)
