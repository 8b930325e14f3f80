"""Extra layers: the encoder with n more Transformer layers on top (DWAtt's Base_+n, 2024).

A fair baseline for methods that add parameters. With the README's sizes one more layer costs
``4 C^2 + 2 C F + 9 C + F`` = 3,152,384 parameters (C = 512, F = 2,048).

The layers are appended to ``encoder.layers``.
"""

import copy
from collections.abc import Iterable
from typing import Any

import torch


def with_extra_layers(cfg: Any) -> Any:
    """Return a copy of *cfg* whose encoder includes the extra layers."""
    cfg = copy.deepcopy(cfg)
    cfg.encoder.layers += cfg.extra_encoder_layers
    return cfg


@torch.no_grad()
def start_layers_as_plain(layers: Iterable[Any]) -> None:
    """Initialise *layers* to return their input: exactly with pre-norm, up to a LayerNorm with post-norm."""
    for layer in layers:
        for last in (layer.self_attn.out_proj, layer.fc2):
            for parameter in last.parameters():  # none without feed-forward sublayer
                parameter.zero_()
