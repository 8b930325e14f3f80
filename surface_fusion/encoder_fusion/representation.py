"""Representation fusion: ``h = sum_n w_n z_n`` with ``w_n = MLP(z_n)`` (Wang et al., 2018, "Multi-layer
representation fusion for neural machine translation").

A network with one hidden layer of C ReLU units computes a scalar weight for every state at every position.
Initially the result is the average.

On the encoder's output. Parameters: ``C^2 + 2 C + 1``; 263,169 for C = 512.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surface_fusion.encoder_fusion.base import EncoderFusion
from surface_fusion.encoder_fusion.registry import register_encoder_fusion


@register_encoder_fusion("representation")
class Representation(EncoderFusion):
    """A sum of the states with weights that a network computes from them."""

    silenceable = True
    any_depth = True

    def __init__(self, states: int, dim: int) -> None:
        super().__init__(states, dim)
        self.hidden = nn.Linear(dim, dim)
        self.weight = nn.Linear(dim, 1)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier initialisation of the hidden layer; every state has the weight 1/N."""
        nn.init.xavier_uniform_(self.hidden.weight)
        nn.init.zeros_(self.hidden.bias)
        nn.init.zeros_(self.weight.weight)
        nn.init.constant_(self.weight.bias, 1 / self.states)

    def forward(self, states: list[Tensor]) -> Tensor:
        """Fuse N states of ... x C into ... x C."""
        return reduce(torch.add, (self.weigh(state) * state for state in states))

    def weigh(self, state: Tensor) -> Tensor:
        """The weight of each position of a state, ... x 1 from ... x C."""
        return self.weight(F.relu(self.hidden(state)))

    def layer_shares(self, states: list[Tensor]) -> Tensor:
        """The weights w_n: ... x N."""
        return torch.cat([self.weigh(state) for state in states], -1)
