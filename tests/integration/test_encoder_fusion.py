"""Every method in a model: padding, incremental decoding, the fast paths, gradients, checkpoints.

Tests ``models/build_fusion.py`` and ``encoder_fusion/states.py``.
"""

import logging
from typing import Any

import pytest
import torch

from surface_fusion.decoding.eligibility import why_not_fast
from surface_fusion.encoder_fusion import methods
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.packed.batch import pack
from surface_fusion.packed.eligibility import why_not_fused, why_not_packed
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.step import PackedStep
from surface_fusion.packed.transformer import PackedTransformer
from tests.helpers.tiny import (
    PAD,
    SHARED,
    assert_incremental_equals_full,
    batch,
    build,
    gradients,
    log_probs,
    loss,
    shaken,
)

ATT = ("--surfacefusion", "att", "--sf-gate", "0.8")
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
INSIDE = ("dlcl", "dense")
NO_DROPOUT = ("--ta-dropout", "0")
VARIANTS = {
    "alone": (),
    "surface": ATT,
    "pre-norm": PRE_NORM,
    "trained key": (*PRE_NORM, *ATT, "--sf-no-detach"),
    "embedding": ("--encoder-fusion-embedding", *ATT),
    "without embedding": ("--no-encoder-fusion-embedding", *ATT),
    "all at once": (*PRE_NORM, "--encoder-fusion-embedding", "--surfacefusion", "mean", "--sf-mode", "soft"),
}

variants = pytest.mark.parametrize("variant", VARIANTS)
each_method = pytest.mark.parametrize("name", methods())


def flags_of(name: str, variant: str) -> tuple[str, ...]:
    return ("--encoder-fusion", name, SHARED, *NO_DROPOUT, *VARIANTS[variant])


def norm_is_frozen(name: str, variant: str) -> bool:
    """Whether the encoder's final LayerNorm norms nothing that is trained."""
    flags = VARIANTS[variant]
    per_layer = name in ("transparent", "fine-grained")
    return per_layer and PRE_NORM[0] in flags and "--sf-no-detach" not in flags


def different(one: Any, other: Any) -> bool:
    return not torch.allclose(one, other, atol=1e-4)


@each_method
def test_each_method_changes_the_output(name: str) -> None:
    """With the plain Transformer's parameters the result is another."""
    plain = shaken(SHARED)
    fused = shaken("--encoder-fusion", name, SHARED)
    with torch.no_grad():
        for parameter_name, parameter in plain.named_parameters():
            fused.get_parameter(parameter_name).copy_(parameter)
    assert different(log_probs(fused, batch()), log_probs(plain, batch()))


@each_method
@variants
def test_padding_does_not_change_the_output(name: str, variant: str) -> None:
    model = shaken(*flags_of(name, variant))
    short = log_probs(model, batch(extra_src=0))
    torch.testing.assert_close(log_probs(model, batch(extra_src=3)), short, atol=1e-5, rtol=1e-5)


@each_method
@variants
@pytest.mark.parametrize("plain", [(), ("--sf-plain",)], ids=["fast", "plain"])
def test_incremental_equals_full(name: str, variant: str, plain: tuple[str, ...]) -> None:
    model = shaken(*flags_of(name, variant), *plain)
    assert why_not_fast(model.decoder) == ("--sf-plain" if plain else None)
    assert_incremental_equals_full(model)


@each_method
@variants
def test_every_parameter_is_trained(name: str, variant: str) -> None:
    """As DistributedDataParallel wants it, which waits for all gradients."""
    model = shaken(*flags_of(name, variant))
    wanting = {n: p.requires_grad for n, p in model.named_parameters()}
    found = gradients(model, batch())
    assert {n for n, grad in found.items() if grad is None} == {n for n in wanting if not wanting[n]}
    frozen = [n for n in wanting if not wanting[n]]
    norm = ["encoder.layer_norm.weight", "encoder.layer_norm.bias"]
    assert frozen == (norm if norm_is_frozen(name, variant) else [])


@each_method
@variants
def test_the_packed_step_equals_the_modules(name: str, variant: str) -> None:
    """Loss and gradients on packed rows are the modules'."""
    model = shaken(*flags_of(name, variant))
    sample = batch()
    expected, value = gradients(model, sample), loss(model, sample)
    model.zero_grad(set_to_none=True)
    flat = FlatParameters.of(p for p in model.parameters() if p.requires_grad)
    assert why_not_fused(model) is None
    assert why_not_packed(model) is None
    flat.zero_grad()
    packed = PackedTransformer(model, flat)
    packed.training = False
    step = PackedStep(packed, 0.0, ignore_prefix_size=0)
    net = sample["net_input"]
    found, backward = step.forward(pack(net["src_tokens"], net["prev_output_tokens"], sample["target"], PAD))
    torch.testing.assert_close(found.loss, value, rtol=1e-5, atol=1e-5)
    backward(torch.tensor(1.0))
    for parameter_name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        torch.testing.assert_close(
            parameter.grad, expected[parameter_name], rtol=1e-4, atol=2e-5, msg=parameter_name
        )


@each_method
def test_activation_checkpointing_changes_no_gradient(name: str) -> None:
    flags = flags_of(name, "surface")
    expected = gradients(shaken(*flags), batch())
    model = shaken(*flags, "--checkpoint-activations")
    found = gradients(model.train(), batch())
    for parameter_name, grad in expected.items():
        torch.testing.assert_close(found[parameter_name], grad, rtol=1e-4, atol=1e-5)


@each_method
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    model = shaken(*flags_of(name, "surface"))
    expected = log_probs(model, batch())
    found = log_probs(model.to(dtype), batch())
    assert found.isfinite().all()
    mean = (found - expected).abs().mean().item()
    assert mean < (0.2 if dtype == torch.bfloat16 else 0.03)


@each_method
def test_a_checkpoint_of_the_same_method_loads(name: str) -> None:
    model = shaken(*flags_of(name, "surface"))
    again, _ = build(*flags_of(name, "surface"), seed=5)
    again.load_state_dict(model.state_dict(), strict=True)
    assert torch.equal(log_probs(again.eval(), batch()), log_probs(model, batch()))


@pytest.mark.parametrize(
    ("flags", "exact"),
    [
        (("--encoder-fusion", "concat"), True),
        (("--encoder-fusion", "dwatt"), True),
        (("--encoder-fusion", "dense"), True),
        (("--encoder-fusion", "extra-layers", "--extra-encoder-layers", "2", *PRE_NORM), True),
        (("--surfacefusion", "att", "--sf-mode", "soft"), True),
        (("--surfacefusion", "att", "--sf-mode", "soft", "--encoder-fusion", "dwatt", "--sf-linear"), True),
        (("--encoder-fusion", "average"), False),
    ],
    ids=str,
)
def test_a_plain_checkpoint_starts_as_the_plain_model(
    flags: tuple[str, ...], exact: bool, caplog: pytest.LogCaptureFixture
) -> None:
    norms = PRE_NORM if PRE_NORM[0] in flags else ()
    plain = shaken(SHARED, *norms, arch="transformer")
    model, _ = build(SHARED, *flags)
    with caplog.at_level(logging.INFO, "surface_fusion"):
        model.load_state_dict(dict(plain.state_dict()), strict=True)
    same = not different(log_probs(model.eval(), batch()), log_probs(plain, batch()))
    assert same == exact
    new = [n for n, _ in model.named_parameters() if n not in plain.state_dict()]
    text = caplog.text
    assert all(n in text for n in new) and ("keep their initial values" in text) == bool(new)
    model.train()
    assert all(grad is not None for grad in gradients(model, batch()).values())


def test_another_methods_checkpoint_is_refused() -> None:
    state = shaken("--encoder-fusion", "concat", SHARED).state_dict()
    model, _ = build("--encoder-fusion", "lstm", SHARED)
    with pytest.raises(SurfaceFusionError, match=r"does not use \(encoder.fusion.weight\)"):
        model.load_state_dict(dict(state), strict=True)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (("average", "--layer-wise-attention"), "--layer-wise-attention and --encoder-fusion average both"),
        (
            ("routing", "--routing-capsules", "5"),
            "--routing-capsules 5 does not divide --encoder-embed-dim 16",
        ),
        (("routing", "--routing-iterations", "0"), "--routing-iterations 0: routing needs at least 1"),
        (("extra-layers", "--extra-encoder-layers", "0"), "--extra-encoder-layers 0 adds nothing"),
        (("dlcl", "--decoder-layers", "0"), "--encoder-fusion dlcl needs decoder layers, got none"),
        (("dwatt", "--encoder-layers", "0"), "--encoder-fusion dwatt needs encoder layers, got none"),
        (("dwatt", "--dwatt-d-pos", "0"), "--dwatt-d-pos 0: widths are positive"),
        (("dwatt", "--no-cross-attention"), "--encoder-fusion dwatt is for a decoder that attends"),
        (("fine-grained", "--layer-wise-attention"), "--layer-wise-attention and --encoder-fusion fine-gr"),
        (("transparent", "--ta-dropout", "1"), "--ta-dropout 1.0 is not a probability below 1"),
    ],
    ids=str,
)
def test_invalid_flags_are_named(flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(SurfaceFusionError, match=text):
        build("--encoder-fusion", *flags)


def test_extra_layers_are_transformer_layers() -> None:
    model = shaken("--encoder-fusion", "extra-layers", "--extra-encoder-layers", "3", SHARED)
    deeper = shaken("--encoder-layers", "5", SHARED)
    assert model.state_dict().keys() == deeper.state_dict().keys()
    deeper.load_state_dict(model.state_dict())
    assert torch.equal(log_probs(model, batch()), log_probs(deeper, batch()))


def test_layerdrop_keeps_one_state_for_each_layer() -> None:
    """A dropped layer is a pass-through, so that each depth has its own weight in every step."""
    flags = ("--encoder-layerdrop", "0.5", "--decoder-layerdrop", "0.5")
    for name in ("dlcl", "concat", "transparent"):
        model = shaken("--encoder-fusion", name, *flags).train()
        for seed in range(4):
            torch.manual_seed(seed)
            assert loss(model, batch()).isfinite()


@pytest.mark.parametrize("name", INSIDE)
@pytest.mark.parametrize("stack", ["encoder", "decoder"])
def test_layerdrop_ends_with_training(name: str, stack: str) -> None:
    """Layers were dropped in evaluation, too: train() did not reach what drops them."""
    model = shaken("--encoder-fusion", name, f"--{stack}-layerdrop", "0.5")
    found = []
    for seed in range(4):
        torch.manual_seed(seed)
        found.append(log_probs(model, batch()))
    assert all(torch.equal(found[0], other) for other in found[1:])


def test_published_flags_are_merged_with_encoder_fusion(caplog: pytest.LogCaptureFixture) -> None:
    both = ("--encoder-fusion", "transparent", "--transparent-attention")
    cfg = build(*both, "--ta-source-embedding", "--layer-wise-attention")[0].cfg
    assert (cfg.encoder_fusion, cfg.encoder_fusion_embedding) == ("transparent", True)
    assert not cfg.layer_wise_attention
    assert build("--encoder-fusion", "fine-grained", "--ta-source-embedding")[0].cfg.encoder_fusion_embedding
    for flags in ((*both, "--fine-grained-ta"), ("--encoder-fusion", "average", "--transparent-attention")):
        with pytest.raises(SurfaceFusionError, match="--transparent-attention asks for --encoder-fusion"):
            build(*flags)
    caplog.clear()
    build("--transparent-attention", "--layer-wise-attention")
    assert "had no effect in the published code" not in caplog.text
    build("--transparent-attention")
    assert caplog.text.count("had no effect in the published code") == 1


def test_a_surface_key_that_is_trained_has_a_trained_norm() -> None:
    model = shaken("--encoder-fusion", "transparent", *PRE_NORM, *ATT, "--sf-no-detach", SHARED)
    assert all(grad is not None for grad in gradients(model, batch()).values())
    assert all(p.requires_grad for p in model.parameters())


@pytest.mark.parametrize("posedemb", [(), ("--ta-posedemb",)], ids=str)
def test_the_embedding_is_dropped_out_once(posedemb: tuple[str, ...]) -> None:
    flags = ("--encoder-fusion-embedding", "--no-ta-embnorm", "--ta-dropout", "0", *posedemb)
    model, _ = build("--encoder-fusion", "transparent", *flags, "--dropout", "0.5")
    seen: list[Any] = []
    model.encoder.fusion.layer_norm.register_forward_pre_hook(lambda _, args: seen.append(args[0]))
    with torch.no_grad():
        model.encoder.fusion.weight.fill_(-100)[:, 0] = 100  # layer 0 alone
    net = batch((9, 9), (2, 2))["net_input"]
    torch.manual_seed(0)
    shares = []
    for _ in range(40):
        model.train().encoder(net["src_tokens"], net["src_lengths"])
        shares.append(seen.pop().eq(0).float().mean().item())
    assert sum(shares) / len(shares) == pytest.approx(0.5, abs=0.03)


@pytest.mark.parametrize("one", ["concat", "routing"])
def test_checkpoints_of_methods_with_one_matrix_are_distinguished(one: str) -> None:
    other = {"concat": "routing", "routing": "concat"}[one]
    state = shaken("--encoder-fusion", one, SHARED).state_dict()
    model, _ = build("--encoder-fusion", other, SHARED)
    with pytest.raises(SurfaceFusionError, match="does not use"):
        model.load_state_dict(dict(state), strict=True)


def test_extra_layers_without_feed_forward_start_as_plain() -> None:
    flags = (SHARED, *PRE_NORM, "--no-encoder-fnn")
    plain = shaken(*flags)
    model, _ = build(*flags, "--encoder-fusion", "extra-layers")
    model.load_state_dict(dict(plain.state_dict()), strict=True)
    torch.testing.assert_close(log_probs(model.eval(), batch()), log_probs(plain, batch()))


@each_method
def test_pruning_is_refused_by_methods_with_parameters_for_each_layer(name: str) -> None:
    flags = ("--encoder-fusion", name, "--encoder-layers-to-keep", "0")
    if name in ("average", "representation", "lstm"):
        assert build(*flags)[0].cfg.encoder.layers == 1
        return
    with pytest.raises(SurfaceFusionError, match=f"--encoder-fusion {name} has parameters for each layer"):
        build(*flags)
