"""Which models the fast paths support, and the reasons in the log for the others.

Also tests ``modules/stacks.py``.
"""

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.distributed import FullyShardedDataParallel, ModuleProxyWrapper
from fairseq.distributed.legacy_distributed_data_parallel import LegacyDistributedDataParallel
from torch import nn

from surface_fusion.modules.stacks import unwrapped
from surface_fusion.packed import eligibility
from surface_fusion.packed.eligibility import more_batches_follow, why_not_fused, why_not_packed
from surface_fusion.packed.flat_parameters import FlatParameters
from tests.helpers.tiny import build

ATT = ("--surfacefusion", "att")
HARD = (*ATT, "--sf-gate", "0.8")


def flat_model(*flags: str, **kwargs: Any) -> Any:
    model, _ = build(*flags, **kwargs)
    model.flat = FlatParameters.of(p for p in model.parameters() if p.requires_grad)  # kept alive
    return model


@pytest.mark.parametrize(
    "flags",
    [
        (),
        HARD,
        ATT,
        (*HARD, "--sf-renormalize"),
        (*ATT, "--sf-mode", "soft", "--share-all-embeddings"),
        ("--surfacefusion", "mean"),
        ("--layer-wise-attention",),
        (*HARD, "--encoder-learned-pos", "--layernorm-embedding", "--encoder-normalize-before"),
    ],
)
def test_supported_models_use_both_fast_paths(flags: tuple[str, ...]) -> None:
    model = flat_model(*flags)
    assert why_not_fused(model) is None
    assert why_not_packed(model) is None


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("--sf-plain",), "--sf-plain"),
        ((*HARD, "--sf-plain"), "--sf-plain"),
        ((*ATT, "--sf-mode", "postnorm_v1"), "--sf-mode postnorm_v1"),
        (("--adaptive-softmax-cutoff", "20"), "--adaptive-softmax-cutoff"),
    ],
)
def test_models_without_fused_loss_are_logged_with_the_reason(flags: tuple[str, ...], reason: str) -> None:
    assert why_not_fused(build(*flags)[0]) == reason


def test_models_of_fairseq_are_not_supported() -> None:
    model, _ = build(arch="transformer")
    assert why_not_fused(model) == "TransformerModel is not a model of surface-fusion"


def test_autocast_is_not_supported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda: True)
    assert why_not_fused(build(*HARD)[0]) == "--amp"


@pytest.mark.parametrize(
    "flags, reason",
    [
        (("--encoder-layerdrop", "0.1"), "LayerDrop"),
        (("--decoder-layerdrop", "0.1"), "LayerDrop"),
        (("--checkpoint-activations",), "--checkpoint-activations"),
        (("--quant-noise-pq", "0.1"), "quantisation noise"),
        (("--quant-noise-scalar", "0.1"), "quantisation noise"),
        (("--cross-self-attention",), "--cross-self-attention"),
        (("--no-cross-attention",), "--no-cross-attention"),
        (("--encoder-layers", "0"), "no layers"),
    ],
)
def test_models_with_fused_loss_but_without_packed_layers(flags: tuple[str, ...], reason: str) -> None:
    model = flat_model(*HARD, *flags)
    assert why_not_fused(model) is None
    assert why_not_packed(model) == reason


def test_an_optimizer_other_than_flat_adam_is_not_supported() -> None:
    model, _ = build(*HARD)
    assert why_not_packed(model) == "an optimizer that is not flat_adam"
    # fairseq's FP16Optimizer gives its optimizer copies of the parameters.
    assert why_not_packed(model.half()) == "an optimizer that is not flat_adam with --memory-efficient-fp16"


def test_frozen_parameters_are_not_supported() -> None:
    model, _ = build(*HARD)
    model.encoder.layers[0].fc1.weight.requires_grad_(False)
    flat = FlatParameters.of(p for p in model.parameters() if p.requires_grad)
    assert flat.contains(p for p in model.parameters() if p.requires_grad)
    assert why_not_packed(model) == "frozen parameters"


@pytest.mark.parametrize("part", ["attn_ln", "c_attn", "ffn_layernorm", "w_resid"])
def test_layers_with_additional_modules_are_not_supported(part: str) -> None:
    """fairseq has these without a flag on the command line."""
    model = flat_model(*HARD)
    setattr(model.decoder.layers[1], part, nn.LayerNorm(16, elementwise_affine=False))
    assert why_not_packed(model) == f"a layer with {part}"


@pytest.mark.parametrize("register", ["register_forward_hook", "register_forward_pre_hook"])
def test_modules_with_hooks_are_not_supported(register: str) -> None:
    """torch's pruning is such a hook: it computes the weight before each forward."""
    model = flat_model(*HARD)
    handle = getattr(model.decoder.layers[1].fc1, register)(lambda *_: None)
    assert why_not_packed(model) == "a hook on decoder.layers.1.fc1"
    handle.remove()
    assert why_not_packed(model) is None


def test_a_copied_model_is_not_supported() -> None:
    """Its parameters are not grouped."""
    model = copy.deepcopy(build(*HARD)[0])
    flat = FlatParameters.of(model.parameters())
    assert flat.contains(model.parameters())
    assert why_not_packed(model) == "parameters that are copies"


def test_layers_of_another_class_are_not_supported() -> None:
    model = flat_model(*HARD)
    model.encoder.layers[1].__class__ = type("OtherLayer", (type(model.encoder.layers[1]),), {})
    assert why_not_packed(model) == "a layer of type OtherLayer"


def test_distributed_wrappers_are_unwrapped_but_not_sharding() -> None:
    model = flat_model(*HARD)
    wrapped = ModuleProxyWrapper(LegacyDistributedDataParallel(model, process_group=object()))
    assert unwrapped(wrapped) is model and unwrapped(model) is model
    assert why_not_fused(wrapped) is None and why_not_packed(wrapped) is None

    class Sharded(FullyShardedDataParallel):
        def __init__(self, module: nn.Module) -> None:  # without fairscale
            nn.Module.__init__(self)
            self.module = module

    assert why_not_fused(Sharded(model)) == "--ddp-backend fully_sharded"
    model.encoder.layers[0] = Sharded(model.encoder.layers[0])
    assert why_not_fused(model) == "--ddp-backend fully_sharded"


class OnGpu:
    """A weight with ``is_cuda``."""

    is_cuda, dtype = True, torch.float16


@pytest.mark.parametrize(
    "triton, widest, reason",
    [
        (True, 16, None),
        (False, 16, "torch.float16 on a GPU without Triton"),
        (True, 15, "heads of more than 15 channels"),  # the surface attention's one head
    ],
)
def test_limits_of_the_kernels(
    triton: bool, widest: int, reason: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = flat_model(*HARD)
    monkeypatch.setattr(eligibility, "use_kernels", lambda weight: triton)
    monkeypatch.setattr(eligibility, "WIDEST_HEAD", widest)
    assert why_not_packed(model) is None
    monkeypatch.setattr(eligibility, "flat_of", lambda model: model)
    del model.decoder.output_projection
    model.decoder.output_projection = type("Projection", (nn.Module,), {"weight": OnGpu})()
    assert why_not_packed(model) == reason


@pytest.mark.parametrize("backend", [LegacyDistributedDataParallel, nn.parallel.DistributedDataParallel])
def test_no_sync_marks_all_but_the_last_batch_of_an_update(tmp_path: Path, backend: Any) -> None:
    model = nn.Linear(2, 2)
    assert not more_batches_follow(model)
    torch.distributed.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        wrapper = ModuleProxyWrapper(backend(model, process_group=torch.distributed.group.WORLD))
        assert not more_batches_follow(wrapper)
        with wrapper.no_sync():
            assert more_batches_follow(wrapper)
        assert not more_batches_follow(wrapper)
    finally:
        torch.distributed.destroy_process_group()
