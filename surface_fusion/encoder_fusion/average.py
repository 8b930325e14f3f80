"""Average: ``h = 1/N sum_n z_n`` (a baseline of DWAtt, 2024).

On the encoder's output. No parameters.
"""

from torch import Tensor

from surface_fusion.encoder_fusion.base import EncoderFusion


class Average(EncoderFusion):
    """The mean of the states."""

    silenceable = True

    def forward(self, states: list[Tensor]) -> Tensor:
        """Fuse N states of ... x C into ... x C."""
        total = states[0]
        for state in states[1:]:
            total = total + state
        return total / len(states)
