"""Extra layers: the encoder with n more Transformer layers on top (DWAtt's Base_+n, 2024).

The fair baseline of everything that adds parameters; with the README's sizes one more layer costs
``4 C^2 + 2 C F + 9 C + F`` = 3,152,384 parameters (C = 512, F = 2,048).

On the encoder's output, and it is nothing but more of the encoder: the layers continue ``encoder.layers``.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch


def with_extra_layers(cfg: Any) -> Any:
    """*cfg* for an encoder that has the extra layers, too."""
    cfg = copy.deepcopy(cfg)
    cfg.encoder.layers += cfg.extra_encoder_layers
    return cfg


@torch.no_grad()
def start_layers_as_plain(layers: Iterable[Any]) -> None:
    """Let *layers* hand on what they get: exactly with pre-norm, but for a LayerNorm otherwise."""
    for layer in layers:
        for last in (layer.self_attn.out_proj, layer.fc2):
            for parameter in last.parameters():  # none without feed-forward sublayer
                parameter.zero_()
