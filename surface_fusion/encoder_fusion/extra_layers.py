"""Extra layers: the encoder with n more Transformer layers on top (DWAtt's Base_+n, 2024), appended to
``encoder.layers``; a fair baseline for methods that add parameters.

On the encoder's output. Parameters: ``4 C^2 + 2 C F + 9 C + F`` per layer; 3,152,384 for C = 512, F = 2,048.
"""

from collections.abc import Iterable
from typing import Any

import torch

from surface_fusion.encoder_fusion.base import EncoderFusion
from surface_fusion.encoder_fusion.registry import register_encoder_fusion


@register_encoder_fusion("extra-layers")
class ExtraLayers(EncoderFusion):
    """More encoder layers. There is no module: the encoder is built with more layers."""

    adds_layers = True

    def __init_subclass__(cls) -> None:
        raise TypeError("ExtraLayers is not a module that a class can be derived from")


@torch.no_grad()
def start_layers_as_plain(layers: Iterable[Any]) -> None:
    """Initialise *layers* to return their input: exactly with pre-norm, up to a LayerNorm with post-norm."""
    for layer in layers:
        for last in (layer.self_attn.out_proj, layer.fc2):
            for parameter in last.parameters():  # none without feed-forward sublayer
                parameter.zero_()
