"""Read the layers of an encoder or a decoder."""

from typing import Any

from torch import nn

SCALES = ("attn_ln", "c_attn", "ffn_layernorm", "w_resid")
"""Attributes that ``--scale-attn`` and similar flags add to a layer; no fast path supports them."""


def layers_of(stack: Any) -> list[Any]:
    """Return all layers, including those that LayerDrop would drop, without FSDP wrappers."""
    return [getattr(layer, "module", layer) for layer in nn.ModuleList.__iter__(stack.layers)]
