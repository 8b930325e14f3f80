"""Values and gradients of the packed forward equal those of the modules.

Also tests ``packed/layers.py``.
"""

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from surface_fusion.ops import activation, add_norm
from surface_fusion.packed import layers
from surface_fusion.packed.batch import Capacity, PackedBatch, pack, pack_static
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.transformer import Features, PackedTransformer
from tests.helpers.interpreter import INTERPRETED, assert_passes_in_the_interpreter, starts_the_interpreter
from tests.helpers.tiny import PAD, batch, shaken

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
    "narrow encoder, narrow output": (*ATT, "--encoder-embed-dim", "8", "--decoder-output-dim", "12"),
    "one decoder layer, three encoder layers": (*ATT, "--encoder-layers", "3", "--decoder-layers", "1"),
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
            gate = model.decoder.gate(features[:, None]).flatten()
    return Features(features, gate)


def features(packed: PackedTransformer, data: PackedBatch) -> Features:
    """The whole forward but for the output embedding."""
    return packed.decode(data, packed.encode(data.src))


def loss(features: Features, weights: torch.Tensor) -> torch.Tensor:
    """A number that depends on every feature."""
    total = (features.rows.flatten(1)[:, : weights.shape[1]] * weights).sum()
    return total + (features.gate.sin().sum() if isinstance(features.gate, torch.Tensor) else 0)


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("static", [False, True])
def test_values_and_gradients_equal_the_modules(name: str, static: bool) -> None:
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
    got = features(packed, data)
    got = Features(got.rows[:15], got.gate[:15] if isinstance(got.gate, torch.Tensor) else got.gate)
    # fairseq's own attention takes its softmax in float32 in whatever dtype.
    torch.testing.assert_close(got.rows, want.rows, rtol=1e-5, atol=TOLERANCE)
    if want.gate is None:
        assert got.gate is None
    else:
        torch.testing.assert_close(
            torch.as_tensor(got.gate), torch.as_tensor(want.gate), rtol=1e-5, atol=TOLERANCE
        )
    packed.flat.zero_grad()
    new = torch.autograd.grad(loss(got, weights), packed.leaves, allow_unused=True)
    for total, gradient in zip(packed.gradients, new, strict=True):
        if gradient is not None:
            total.add_(gradient)
    for n, p in model.named_parameters():
        want_gradient = gradients.get(n, torch.zeros_like(p))
        torch.testing.assert_close(
            p.grad, want_gradient, rtol=1e-4, atol=2e-5, msg=lambda m, n=n: f"{n}: {m}"
        )


@starts_the_interpreter
def test_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    """A few models by the kernels."""
    same = f"{__file__}::{test_values_and_gradients_equal_the_modules.__name__}"
    models = ("True-hard", "False-learned gate", "True-max", "True-pre-norm, no final norm", "False-gelu")
    dropout = [test_dropout_follows_torchs_seed, test_surface_and_input_share_one_dropout_mask]
    assert_passes_in_the_interpreter(
        pytestconfig,
        *(f"{same}[{model}]" for model in models),
        *(f"{__file__}::{test.__name__}" for test in dropout),
    )


# Dropout

RATES = ("--dropout", "0.1", "--attention-dropout", "0.2", "--activation-dropout", "0.3")


@pytest.mark.skipif(INTERPRETED, reason="the kernels do not call torch's dropout")
@pytest.mark.parametrize("name", MODELS)
def test_dropout_is_applied_where_the_modules_apply_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Replace dropout by a product with 1 + rate, so that the result shows where each rate is applied."""
    attention = F.scaled_dot_product_attention

    def marked(x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return x * (1 + p) if training else x

    def marked_attention(
        q: Tensor,
        k: Tensor,
        v: Tensor,
        attn_mask: Any = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
    ) -> Tensor:
        return attention(q, k, v, attn_mask=attn_mask, is_causal=is_causal) * (1 + dropout_p)

    monkeypatch.setattr(F, "dropout", marked)
    for module in (activation, add_norm, layers):
        monkeypatch.setattr(module, "dropout", lambda x, rate: x * (1 + rate))
    monkeypatch.setattr(F, "scaled_dot_product_attention", marked_attention)
    model = shaken(*MODELS[name], *RATES).to(DTYPE).train()
    packed = packed_of(model)
    sample = batch((5, 7, 3), (6, 4, 5), extra_src=1)
    got = {}
    for packed.training in (True, False):
        model.train(packed.training)
        want, got[packed.training] = expected(model, sample), features(packed, packed_batch(sample))
        torch.testing.assert_close(got[packed.training].rows, want.rows, rtol=1e-5, atol=TOLERANCE)
    assert not torch.allclose(got[True].rows, got[False].rows)


def training_model(*flags: str) -> PackedTransformer:
    packed = packed_of(shaken(*flags, "--dropout", "0.5").to(DTYPE))
    packed.training = True
    return packed


def test_dropout_follows_torchs_seed() -> None:
    packed = training_model(*ATT, "--attention-dropout", "0.5", "--activation-dropout", "0.5")
    data = packed_batch(batch())

    def rows(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return features(packed, data).rows

    first = rows(1)
    assert first.equal(rows(1))
    assert not first.equal(rows(2))
    torch.manual_seed(1)
    features(packed, data)
    assert not first.equal(features(packed, data).rows)  # the next step


def surfaces(packed: PackedTransformer, data: PackedBatch) -> list[Tensor]:
    """What the decoder reads of the source, in training and not."""
    encodings = []
    encode = packed.encode
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed, "encode", lambda rows: encodings.append(encode(rows)) or encodings[-1])
        for packed.training in (True, False):
            features(packed, data)
    return [encoded.surface for encoded in encodings]


@pytest.mark.parametrize("flags", [(), ("--sf-posedemb",), ("--no-token-positional-embeddings",)])
def test_surface_and_input_share_one_dropout_mask(
    flags: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    packed = training_model(*ATT, *flags)
    inputs: list[Tensor] = []
    original = packed._self_attention

    def watched(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        inputs.append(x)
        return original(x, *args, **kwargs)

    monkeypatch.setattr(packed, "_self_attention", watched)
    data = packed_batch(batch((50, 30), (4, 4)))
    surface, whole = surfaces(packed, data)
    assert surface.eq(0).equal(inputs[0].eq(0))
    assert surface.eq(0).double().mean().item() == pytest.approx(0.5, abs=0.05)
    torch.testing.assert_close(surface, torch.where(surface == 0, 0, 2 * whole))


@pytest.mark.parametrize("source", ["mean", "max"])
def test_a_pooled_surface_has_its_own_dropout_mask(source: str) -> None:
    packed = training_model("--surfacefusion", source, "--sf-gate", "0.5")
    # Pooling comes before dropout.
    surface, whole = surfaces(packed, packed_batch(batch((3,) * 40, (2,) * 40)))
    assert surface.eq(0).double().mean().item() == pytest.approx(0.5, abs=0.1)
    torch.testing.assert_close(surface, torch.where(surface == 0, 0, 2 * whole))


# In captured graphs


def test_a_capacity_longer_than_the_table_of_positions() -> None:
    """Only padding sentences are that long: their rows read the last entry of the table."""
    model = shaken(*ATT, "--encoder-learned-pos", "--max-source-positions", "8").to(DTYPE)
    packed = packed_of(model)
    sample = batch((5, 8), (6, 4))
    want = expected(model, sample).rows
    got = features(packed, static_batch(sample, Capacity(src=1024, tgt=64, padded=64))).rows
    torch.testing.assert_close(got[: len(want)], want, rtol=1e-5, atol=TOLERANCE)


def test_each_parameter_is_one_leaf() -> None:
    packed = packed_of(shaken(*ATT).to(DTYPE))
    for _ in range(2):
        features(packed, packed_batch(batch()))
        leaves = list(packed.leaves)
        assert len(leaves) == len({leaf.data_ptr() for leaf in leaves}) == len(packed.gradients)
    # Every parameter but the output embedding, which the loss reads.
    assert sum(x.numel() for x in leaves) == sum(
        p.numel() for n, p in packed.decoder.named_parameters() if n != "output_projection.weight"
    ) + sum(p.numel() for p in packed.encoder.parameters())
    assert packed.output_embedding.data_ptr() == packed.decoder.output_projection.weight.data_ptr()
