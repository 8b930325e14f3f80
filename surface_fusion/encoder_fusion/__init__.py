"""Encoder layer fusion: combine the encoder's layers into the decoder's memory (``--encoder-fusion``).

Each method has its own file. To add one, add its file, a line below, its name in
``config/encoder_fusion.py``, and a test.
"""

from collections.abc import Callable
from typing import Any

from torch import Tensor

from surface_fusion.encoder_fusion.average import Average
from surface_fusion.encoder_fusion.base import EncoderFusion
from surface_fusion.encoder_fusion.concat import Concat
from surface_fusion.encoder_fusion.dense import Dense
from surface_fusion.encoder_fusion.dlcl import DLCL
from surface_fusion.encoder_fusion.dwatt import DWAtt
from surface_fusion.encoder_fusion.layer_combination import Combination
from surface_fusion.encoder_fusion.lstm import DepthwiseLSTM
from surface_fusion.encoder_fusion.representation import Representation
from surface_fusion.encoder_fusion.routing import Routing
from surface_fusion.encoder_fusion.transparent import FineGrained, LayerAttention, Transparent

ON_THE_OUTPUT: dict[str, type[EncoderFusion]] = {
    "average": Average,
    "concat": Concat,
    "dwatt": DWAtt,
    "representation": Representation,
    "lstm": DepthwiseLSTM,
    "routing": Routing,
}
FOR_EACH_DECODER_LAYER: dict[str, type[LayerAttention]] = {
    "transparent": Transparent,
    "fine-grained": FineGrained,
}
INSIDE_THE_STACKS: dict[str, type[Combination]] = {"dlcl": DLCL, "dense": Dense}


def build_fusion(cfg: Any) -> EncoderFusion | LayerAttention | None:
    """Build the fusion module at the end of the encoder, or None if the method has none."""
    build: Any = {**ON_THE_OUTPUT, **FOR_EACH_DECODER_LAYER}.get(cfg.encoder_fusion)
    return None if build is None else build(cfg)


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


def build_combination(cfg: Any, stack: Any, dim: int) -> Combination | None:
    """Build the combination for the layers of *stack*, a section of *cfg*, or None if the method has none."""
    build = INSIDE_THE_STACKS.get(cfg.encoder_fusion)
    embedding = not cfg.no_encoder_fusion_embedding
    return None if build is None else build(dim, stack.layers, stack.normalize_before, embedding)
