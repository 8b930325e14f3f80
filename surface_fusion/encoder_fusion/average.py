"""Average: ``h = 1/N sum_n z_n`` (a baseline of DWAtt, 2024).

On the encoder's output. No parameters.
"""

from functools import reduce

import torch
from torch import Tensor

from surface_fusion.encoder_fusion.base import EncoderFusion
from surface_fusion.encoder_fusion.registry import register_encoder_fusion


@register_encoder_fusion("average")
class Average(EncoderFusion):
    """The mean of the states."""

    silenceable = True
    any_depth = True

    def forward(self, states: list[Tensor]) -> Tensor:
        """Fuse N states of ... x C into ... x C."""
        return reduce(torch.add, states) / len(states)

    def layer_shares(self, states: list[Tensor]) -> Tensor:
        """1/N: N."""
        return states[0].new_full((self.states,), 1 / self.states)
