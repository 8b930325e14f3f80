"""Concat: ``h = sum_n W_n z_n``, a linear map of all states side by side (a baseline of DWAtt, 2024).

On the encoder's output. Parameters: N C^2; 1,572,864 for C = 512 and 6 layers.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surface_fusion.encoder_fusion.base import EncoderFusion
from surface_fusion.encoder_fusion.registry import register_encoder_fusion


@register_encoder_fusion("concat")
class Concat(EncoderFusion):
    """A linear map of the concatenated states, computed without concatenating them.

    Attributes:
        weight: N x C x C.
    """

    silenceable = True

    def __init__(self, states: int, dim: int) -> None:
        super().__init__(states, dim)
        self.weight = nn.Parameter(torch.empty(states, dim, dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Xavier initialisation of the map as a whole."""
        bound = (6 / (self.states * self.dim + self.dim)) ** 0.5
        nn.init.uniform_(self.weight, -bound, bound)

    def forward(self, states: list[Tensor]) -> Tensor:
        """Fuse N states of ... x C into ... x C."""
        return reduce(torch.add, (F.linear(z, w) for z, w in zip(states, self.weight, strict=True)))

    @torch.no_grad()
    def start_as_plain(self) -> None:
        """Initialise with the identity for the last state and zero for the others."""
        self.weight.zero_()
        self.weight[-1].fill_diagonal_(1)

    def layer_shares(self, states: list[Tensor]) -> Tensor:
        """The share of ||W_n|| (Frobenius) in the sum over n: N."""
        norms = self.weight.flatten(1).norm(dim=1)
        return norms / norms.sum()
