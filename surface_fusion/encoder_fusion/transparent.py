"""Transparent attention: one weight per layer and decoder layer (Bapna et al., 2018,
https://arxiv.org/abs/1808.07561). The equation is in ``layer_attention.py``; W is M x N.

Per decoder layer. Parameters: ``M N + 2 C``; 1,060 for C = 512 and 6 layers.
"""

from typing import Any

from surface_fusion.encoder_fusion.layer_attention import LayerAttention
from surface_fusion.encoder_fusion.registry import register_encoder_fusion


@register_encoder_fusion("transparent")
class Transparent(LayerAttention):
    """Layer attention with one weight per layer."""

    def __init__(self, states: int, dim: int, decoder_layers: int, **shared: Any) -> None:
        super().__init__(states, dim, decoder_layers, channels=False, **shared)
