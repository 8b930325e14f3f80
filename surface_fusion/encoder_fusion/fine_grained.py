"""Fine-grained layer attention: one weight per channel, layer and decoder layer (Liu et al., ICLR 2021,
https://arxiv.org/abs/2012.14768, the probe behind its figure 1). The equation is in
``layer_attention.py``; W is M x N x C, in the paper with DropConnect (``--ta-dropconnect``, p = 0.3).

Per decoder layer. Parameters: ``M N C + 2 C``; 19,456 for C = 512 and 6 layers.
"""

from typing import Any

from surface_fusion.encoder_fusion.layer_attention import LayerAttention
from surface_fusion.encoder_fusion.registry import register_encoder_fusion


@register_encoder_fusion("fine-grained")
class FineGrained(LayerAttention):
    """Layer attention with one weight per channel and layer."""

    def __init__(self, states: int, dim: int, decoder_layers: int, **shared: Any) -> None:
        super().__init__(states, dim, decoder_layers, channels=True, **shared)
