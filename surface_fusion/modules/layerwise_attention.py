"""Decoder layers that attend to their own slice of the encoder's output channels.

With ``--layer-wise-attention`` (He et al., "Layer-wise coordination between encoder and decoder", NeurIPS
2018; a published flag) slice i is the output of encoder layer i, the last one after the encoder's final
LayerNorm. With layer attention it is the mix for decoder layer i, see ``encoder_fusion/layer_attention.py``.

The encoder returns all slices concatenated on the channel axis, S x B x (L C); fairseq's beam search reorders
this tensor like any encoder output.
"""

from typing import Any

import torch
from fairseq.distributed import fsdp_wrap
from fairseq.modules.checkpoint_activations import checkpoint_wrapper
from fairseq.modules.transformer_layer import TransformerDecoderLayerBase
from torch import Tensor


def concatenate_layers(encoder_states: list[Tensor], encoder_out: Tensor) -> Tensor:
    """Concatenate all layers' outputs on the channel axis: S x B x (L C).

    *encoder_states* are the embedding layer and L layers, S x B x C each; *encoder_out* replaces the last.
    """
    return torch.cat([*encoder_states[1:-1], encoder_out], dim=-1)


class LayerwiseDecoderLayer(TransformerDecoderLayerBase):
    """A decoder layer that attends to the slice of number *memory_index*, which the decoder sets."""

    memory_index: int

    def __init__(self, cfg: Any, no_encoder_attn: bool = False) -> None:
        super().__init__(cfg, no_encoder_attn)
        self.memory_dim = cfg.encoder.embed_dim

    def forward(self, x: Tensor, encoder_out: Tensor | None = None, *args: Any, **kwargs: Any) -> Any:
        """Compute fairseq's layer on a slice of *encoder_out*, S x B x (L C) or more channels."""
        if encoder_out is not None:
            encoder_out = encoder_out.narrow(-1, self.memory_index * self.memory_dim, self.memory_dim)
        return super().forward(x, encoder_out, *args, **kwargs)


def wrap_layer(layer: LayerwiseDecoderLayer, cfg: Any) -> Any:
    """Wrap *layer* as fairseq wraps its own: activation checkpointing and FSDP."""
    if cfg.checkpoint_activations:
        layer = checkpoint_wrapper(layer, offload_to_cpu=cfg.offload_activations)
    return fsdp_wrap(layer, min_num_params=0 if cfg.checkpoint_activations else cfg.min_params_to_wrap)
