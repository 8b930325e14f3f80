"""Depth-wise LSTM: an LSTM reads the states of a position from the lowest to the highest (Li et al., 2018).

    (h_n, c_n) = LSTM(z_n, (h_{n-1}, c_{n-1})),  h_0 = c_0 = 0;  the result is h_N

On the encoder's output. Parameters: ``8 C^2 + 8 C``; 2,101,248 for C = 512, whatever the depth.
"""

from typing import Any

from torch import Tensor, nn

from surface_fusion.encoder_fusion.base import EncoderFusion
from surface_fusion.encoder_fusion.registry import register_encoder_fusion


@register_encoder_fusion("lstm")
class DepthwiseLSTM(EncoderFusion):
    """The last output of an LSTM over the layer axis."""

    any_depth = True

    def __init__(self, states: int, dim: int) -> None:
        super().__init__(states, dim)
        self.cell = nn.LSTMCell(dim, dim)

    def forward(self, states: list[Tensor]) -> Tensor:
        """Fuse N states of ... x C into ... x C."""
        memory: Any = None
        for state in states:
            memory = self.cell(state.reshape(-1, self.dim), memory)
        return memory[0].view(states[-1].shape)
