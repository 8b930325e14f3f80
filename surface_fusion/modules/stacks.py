"""Find a model inside distributed wrappers, and the layers of its encoder and decoder."""

from typing import Any

from torch import nn

SCALES = ("attn_ln", "c_attn", "ffn_layernorm", "w_resid")
"""Attributes that ``--scale-attn`` and similar flags add to a layer; no fast path supports them."""


def layers_of(stack: Any) -> list[Any]:
    """Return all layers, including those that LayerDrop would drop, without FSDP wrappers."""
    return [getattr(layer, "module", layer) for layer in nn.ModuleList.__iter__(stack.layers)]


def has_forward_hooks(module: nn.Module) -> bool:
    """Whether a hook acts on the forward of *module* itself; fast paths do not call modules."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def unwrapped(model: Any) -> Any:
    """Return the model inside fairseq's distributed wrappers."""
    while not hasattr(type(model), "build_model") and hasattr(model, "module"):
        model = model.module
    return model
