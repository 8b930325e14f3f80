"""Which parameters are grouped, and that names and shapes in checkpoints stay the same."""

import pytest
import torch
from torch import Tensor

from surface_fusion.packed.flat_parameters import FlatParameters
from tests.helpers.tiny import build

ATT = ("--surfacefusion", "att", "--sf-gate", "0.8")
NARROW = ("--encoder-embed-dim", "24", "--decoder-embed-dim", "16")
LAYER_WISE = ("--layer-wise-attention", "--encoder-layers", "3")
LAYER_DROP = ("--encoder-layerdrop", "0.9", "--decoder-layerdrop", "0.9")


@pytest.mark.parametrize("flags", [(), ATT, NARROW, LAYER_WISE, LAYER_DROP])
def test_projections_of_the_same_input_are_one_matrix(flags: tuple[str, ...]) -> None:
    model, _ = build(*flags)
    before = {name: x.clone() for name, x in model.state_dict().items()}
    flat = FlatParameters.of(model.parameters())
    params = dict(model.named_parameters())

    def stacked(group: str, *names: str) -> None:
        """The group is these parameters stacked, and so are the gradients."""
        for kind in ("weight", "bias"):
            members = [params[f"{name}.{kind}"] for name in names]
            for member in members:
                member.grad.normal_()
            data, grad = flat.group_view(f"{group}.{kind}")
            assert data.equal(torch.cat([p.data for p in members]))
            assert grad.equal(torch.cat([p.grad for p in members]))

    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for i in range(stack.num_layers):
            attention = f"{name}.layers.{i}.self_attn"
            stacked(attention, *(f"{attention}.{x}_proj" for x in "qkv"))
    if flags == LAYER_WISE:
        for i in range(2):
            attention = f"decoder.layers.{i}.encoder_attn"
            stacked(f"decoder.memory.{i}", f"{attention}.k_proj", f"{attention}.v_proj")
    else:
        names = [f"decoder.layers.{i}.encoder_attn.{x}_proj" for i in range(2) for x in "kv"]
        stacked("decoder.memory.-1", *names)

    after: dict[str, Tensor] = model.state_dict()
    assert list(after) == list(before)
    assert all(after[name].equal(x) for name, x in before.items())


def test_projections_of_different_inputs_are_not_grouped() -> None:
    model, _ = build(*ATT)
    grouped = {name for name, p in model.named_parameters() if hasattr(p, "flat_group")}
    assert all(".self_attn." in n or "encoder_attn.k" in n or "encoder_attn.v" in n for n in grouped)
    assert not any("out_proj" in n or "sf_attn" in n or "fc" in n or "embed" in n for n in grouped)


def test_a_decoder_without_cross_attention_has_no_memory_group() -> None:
    model, _ = build("--no-cross-attention")
    flat = FlatParameters.of(model.parameters())
    with pytest.raises(KeyError):
        flat.group_view("decoder.memory.-1.weight")
