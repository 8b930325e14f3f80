"""Encoder layer fusion: combine the encoder's layers into what the decoder attends to (``--encoder-fusion``).

Each method is one file, registered by :func:`register_encoder_fusion`. The package imports torch and ``ops``
only: its modules can be used without fairseq. ``docs/adding_a_method.md`` shows how to add a method.
"""

from surface_fusion.encoder_fusion.average import Average
from surface_fusion.encoder_fusion.base import EncoderFusion, FusionMethod
from surface_fusion.encoder_fusion.concat import Concat
from surface_fusion.encoder_fusion.dense import Dense
from surface_fusion.encoder_fusion.dlcl import DLCL
from surface_fusion.encoder_fusion.dwatt import DWAtt
from surface_fusion.encoder_fusion.extra_layers import ExtraLayers
from surface_fusion.encoder_fusion.fine_grained import FineGrained
from surface_fusion.encoder_fusion.layer_attention import LayerAttention
from surface_fusion.encoder_fusion.layer_combination import Combination
from surface_fusion.encoder_fusion.lstm import DepthwiseLSTM
from surface_fusion.encoder_fusion.registry import methods, options_of, register_encoder_fusion
from surface_fusion.encoder_fusion.representation import Representation
from surface_fusion.encoder_fusion.routing import Routing
from surface_fusion.encoder_fusion.transparent import Transparent

__all__ = [
    "DLCL",
    "Average",
    "Combination",
    "Concat",
    "DWAtt",
    "Dense",
    "DepthwiseLSTM",
    "EncoderFusion",
    "ExtraLayers",
    "FineGrained",
    "FusionMethod",
    "LayerAttention",
    "Representation",
    "Routing",
    "Transparent",
    "methods",
    "options_of",
    "register_encoder_fusion",
]
