"""Select the states that a method of encoder layer fusion reads."""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from surface_fusion.encoder_fusion.layer_attention import LayerAttention


def fused_states(
    cfg: Any, fusion: Any, states: list[Tensor], word_embeddings: Callable[[], Tensor]
) -> list[Tensor]:
    """Return the inputs of *fusion*: the layers' outputs, preceded by the embedding layer if it is fused.

    Args:
        states: the encoder's input and its layers' outputs, ... x C each.
        word_embeddings: gives the scaled embeddings without positions, ... x C.
    """
    if not cfg.encoder_fusion_embedding:
        return states[1:]
    if isinstance(fusion, LayerAttention) and not cfg.ta_posedemb:
        return [word_embeddings(), *states[1:]]
    return states
