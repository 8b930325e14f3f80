"""Layer-wise attention: decoder layer i attends to encoder layer i, in full passes and step by step."""

from typing import Any

import pytest
import torch
from fairseq.models.transformer import TransformerEncoderBase
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor

from surface_fusion.modules.layerwise_attention import LayerwiseDecoderLayer, concatenate_layers
from tests.helpers.tiny import PAD, assert_incremental_equals_full, batch, build, gradients, log_probs, shaken

FLAG = "--layer-wise-attention"
DEPTH = ("--encoder-layers", "3", "--decoder-layers", "3")
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
VARIANTS = [
    (),
    PRE_NORM,
    ("--encoder-layers", "4"),
    ("--encoder-embed-dim", "24", "--decoder-embed-dim", "16"),
    ("--cross-self-attention",),
    ("--surfacefusion", "att"),
    ("--surfacefusion", "mean", "--sf-mode", "soft", *PRE_NORM),
]


def memories(model: Any, sample: dict[str, Any]) -> list[Tensor]:
    """Each encoder layer's output from fairseq's own encoder; the last one after the final LayerNorm."""
    net = sample["net_input"]
    out = TransformerEncoderBase.forward(model.encoder, net["src_tokens"], net["src_lengths"], True)
    return [*out["encoder_states"][1:-1], out["encoder_out"][0]]


@pytest.mark.parametrize("flags", VARIANTS, ids=" ".join)
def test_each_decoder_layer_attends_to_its_encoder_layer(flags: tuple[str, ...]) -> None:
    model = shaken(FLAG, *DEPTH, *flags)
    sample = batch(tgt_lengths=(6, 6, 6))
    memory = memories(model, sample)
    _, extra = model(**sample["net_input"])
    mask = sample["net_input"]["src_tokens"].eq(PAD)
    streams = extra["inner_states"]
    for i, layer in enumerate(model.decoder.layers):
        x = streams[i]
        padding = torch.zeros(3, 6, dtype=torch.bool) if "--cross-self-attention" in flags else None
        expected, _, _ = TransformerDecoderLayerBase.forward(
            layer,
            x,
            memory[i],
            mask,
            self_attn_mask=model.decoder.buffered_future_mask(x),
            self_attn_padding_mask=padding,
        )
        torch.testing.assert_close(streams[i + 1], expected, atol=2e-6, rtol=1e-5)
    if not flags:  # the layers' outputs differ
        assert all((memory[0] - m).abs().max() > 0.1 for m in memory[1:])


@pytest.mark.parametrize("flags", VARIANTS, ids=" ".join)
def test_step_by_step_equals_the_full_pass_also_after_reordering(flags: tuple[str, ...]) -> None:
    assert_incremental_equals_full(shaken(FLAG, *DEPTH, *flags))


@pytest.mark.parametrize("flags", [(), ("--surfacefusion", "att")], ids=" ".join)
@pytest.mark.parametrize("extra", ["--checkpoint-activations", "--offload-activations"])
def test_activation_checkpointing_changes_no_gradient(flags: tuple[str, ...], extra: str) -> None:
    flags = (FLAG, *DEPTH, "--dropout", "0.2", *flags)
    plain, checkpointed = build(*flags)[0], build(*flags, extra)[0]
    assert all(isinstance(layer, LayerwiseDecoderLayer) for layer in checkpointed.decoder.layers)
    assert all(hasattr(layer, "precheckpoint_forward") for layer in checkpointed.decoder.layers)
    sample = batch()
    grads = []
    for model in (plain, checkpointed):
        torch.manual_seed(5)
        grads.append(gradients(model.train(), sample))
    for name, grad in grads[0].items():
        torch.testing.assert_close(grads[1][name], grad, atol=1e-5, rtol=1e-4, msg=name)


@pytest.mark.parametrize(
    "flags", [("--no-cross-attention",), ("--no-cross-attention", "--cross-self-attention")]
)
def test_without_cross_attention(flags: tuple[str, ...]) -> None:
    model = shaken(FLAG, *DEPTH, *flags)
    assert_incremental_equals_full(model)
    sample, changed = batch(), batch()
    changed["net_input"]["src_tokens"][:, -2] = 9
    differs = not torch.equal(log_probs(model, changed), log_probs(model, sample))
    assert differs == ("--cross-self-attention" in flags)


def test_one_layer() -> None:
    model = shaken(FLAG, "--encoder-layers", "1", "--decoder-layers", "1")
    plain = shaken("--encoder-layers", "1", "--decoder-layers", "1")
    sample = batch()
    torch.testing.assert_close(log_probs(model, sample), log_probs(plain, sample))


def test_parameters_are_those_of_a_plain_transformer() -> None:
    model, plain = build(FLAG)[0], build()[0]
    assert {n: p.shape for n, p in model.named_parameters()} == {
        n: p.shape for n, p in plain.named_parameters()
    }


def test_all_hidden_states_are_still_returned() -> None:
    model = shaken(FLAG, *DEPTH)
    net = batch()["net_input"]
    out = model.encoder(net["src_tokens"], net["src_lengths"], return_all_hiddens=True)
    assert len(out["encoder_states"]) == 4
    assert model.encoder(net["src_tokens"], net["src_lengths"])["encoder_states"] == []


def test_concatenate_layers() -> None:
    states = [torch.full((2, 1, 3), float(i)) for i in range(4)]
    memory = concatenate_layers(states, torch.full((2, 1, 3), 9.0))
    assert memory[0, 0].tolist() == [1.0] * 3 + [2.0] * 3 + [9.0] * 3


def test_layerdrop_in_both_stacks_trains_and_keeps_the_pairing() -> None:
    flags = (FLAG, *DEPTH, "--encoder-layerdrop", "0.5", "--decoder-layerdrop", "0.5")
    model, sample = build(*flags)[0].train(), batch()
    for seed in range(8):
        torch.manual_seed(seed)
        dropped = [(torch.empty(3).uniform_() <= 0.5).tolist() for _ in range(2)]
        torch.manual_seed(seed)
        _, extra = model(**sample["net_input"])
        torch.manual_seed(seed)
        out = model.encoder(sample["net_input"]["src_tokens"], return_all_hiddens=True)
        memory = out["encoder_out"][0].chunk(3, dim=-1)
        for i in range(3):
            before, after = extra["inner_states"][i : i + 2]
            if dropped[1][i]:
                assert after is before
                continue
            layer = model.decoder.layers[i]
            args = (before, memory[i], sample["net_input"]["src_tokens"].eq(PAD))
            expected, _, _ = TransformerDecoderLayerBase.forward(
                layer,
                *args,
                self_attn_mask=model.decoder.buffered_future_mask(before),
                self_attn_padding_mask=sample["net_input"]["prev_output_tokens"].eq(PAD),
            )
            torch.testing.assert_close(after, expected)
