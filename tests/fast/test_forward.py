"""The packed forward is the modules' own forward, values and gradients."""

from typing import Any

import pytest
import torch
from tiny import PAD, batch, build, shaken

from surface_fusion.fast.flat import FlatParameters
from surface_fusion.fast.forward import Features, PackedTransformer
from surface_fusion.fast.packed import Capacity, PackedBatch, pack, pack_static
from surface_fusion.fast.triton_installed import INTERPRETED

DTYPE = torch.float32 if INTERPRETED else torch.float64  # kernels are for the former
TOLERANCE = 1e-5 if INTERPRETED else 1e-6

ATT = ("--surfacefusion", "att", "--sf-gate", "0.8")
MODELS = {
    "hard": ATT,
    "learned gate": ("--surfacefusion", "att"),
    "renormalised": (*ATT, "--sf-renormalize"),
    "renormalised learned gate": ("--surfacefusion", "att", "--sf-renormalize"),
    "soft": (*ATT, "--sf-mode", "soft", "--sf-softmax-tau", "0.7"),
    "postnorm_5": (*ATT, "--sf-mode", "postnorm_5"),
    "no detach, layer 0, two heads": (*ATT, "--sf-no-detach", "--sf-idx", "0", "--sf-attention-heads", "2"),
    "positions in the surface": (*ATT, "--sf-posedemb"),
    "linear, no ffn": (*ATT, "--sf-linear", "--no-sf-ffn"),
    "mean": ("--surfacefusion", "mean", "--sf-gate", "0.5"),
    "max": ("--surfacefusion", "max", "--sf-mode", "soft"),
    "published mean": ("--surfacefusion", "mean", "--sf-mode", "soft", "--sf-pool-published"),
    "published max": ("--surfacefusion", "max", "--sf-mode", "soft", "--sf-pool-published"),
    "pre-norm": (*ATT, "--encoder-normalize-before", "--decoder-normalize-before"),
    "pre-norm, no final norm": (*ATT, "--decoder-normalize-before", "--no-decoder-final-norm"),
    "layer-wise": (*ATT, "--layer-wise-attention"),
    "layer-wise pre-norm": (
        *("--layer-wise-attention", "--encoder-normalize-before", "--decoder-normalize-before"),
    ),
    "plain": (),
    "plain tied": ("--share-all-embeddings",),
    "tied": (*ATT, "--share-all-embeddings"),
    "layernorm, learned positions": (
        *(*ATT, "--layernorm-embedding", "--encoder-learned-pos", "--decoder-learned-pos"),
    ),
    "no positions, no scale": (*ATT, "--no-token-positional-embeddings", "--no-scale-embedding"),
    "gelu": (*ATT, "--activation-fn", "gelu"),
}


def packed_of(model: Any) -> PackedTransformer:
    flat = FlatParameters.of(p for p in model.parameters() if p.requires_grad)
    packed = PackedTransformer(model, flat)
    packed.training = False
    return packed


def packed_batch(sample: dict[str, Any]) -> PackedBatch:
    net = sample["net_input"]
    return pack(net["src_tokens"], net["prev_output_tokens"], sample["target"], PAD)


def static_batch(sample: dict[str, Any], capacity: Capacity) -> PackedBatch:
    net = sample["net_input"]
    sides = net["src_tokens"], net["prev_output_tokens"], sample["target"]
    flat = [torch.full((capacity.padded,), PAD) for _ in sides]
    for static, side in zip(flat, sides, strict=True):
        static[: side.numel()] = side.flatten()
    shape = torch.tensor([*sides[0].shape, sides[1].shape[1]])
    return pack_static(*flat, shape, capacity, PAD)


def expected(model: Any, sample: dict[str, Any]) -> Features:
    """What the modules give for the rows that are not padding."""
    features = model(**sample["net_input"], features_only=True)[0][sample["target"].ne(PAD)]
    gate = None
    if features.dim() == 3:
        gate = model.cfg.sf_gate
        if model.decoder.cfg.learned_gate:
            gate = model.decoder._gate(features[:, None]).flatten()
    return Features(features, gate)


def loss(features: Features, weights: torch.Tensor) -> torch.Tensor:
    """A number that depends on every feature."""
    total = (features.rows.flatten(1)[:, : weights.shape[1]] * weights).sum()
    return total + (features.gate.sin().sum() if isinstance(features.gate, torch.Tensor) else 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("static", [False, True])
def test_values_and_gradients_are_those_of_the_modules(name: str, static: bool) -> None:
    model = shaken(*MODELS[name]).to(DTYPE)
    packed = packed_of(model)
    sample = batch((5, 7, 3), (6, 4, 5), extra_src=1, extra_tgt=2)
    model.zero_grad()
    want = expected(model, sample)
    weights = torch.randn(15, want.rows[0].numel(), dtype=DTYPE)
    loss(want, weights).backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}

    data = packed_batch(sample)
    if static:
        data = static_batch(sample, Capacity(src=64, tgt=64, padded=64))
    got = packed.features(data)
    got = Features(got.rows[:15], got.gate[:15] if isinstance(got.gate, torch.Tensor) else got.gate)
    # fairseq's own attention takes its softmax in float32 in whatever dtype.
    torch.testing.assert_close(got.rows, want.rows, rtol=1e-5, atol=TOLERANCE)
    if want.gate is None:
        assert got.gate is None
    else:
        torch.testing.assert_close(torch.as_tensor(got.gate), torch.as_tensor(want.gate), rtol=1e-5, atol=TOLERANCE)
    packed.flat.zero_grad()
    found = torch.autograd.grad(loss(got, weights), packed.leaves, allow_unused=True)
    for into, gradient in zip(packed.gradients, found, strict=True):
        if gradient is not None:
            into.add_(gradient)
    for n, p in model.named_parameters():
        want_gradient = gradients.get(n, torch.zeros_like(p))
        torch.testing.assert_close(p.grad, want_gradient, rtol=1e-4, atol=2e-5, msg=lambda m, n=n: f"{n}: {m}")
