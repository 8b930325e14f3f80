"""What every method of encoder layer fusion is: a module from the encoder's states to what the decoder reads.

States are the outputs z_1 ... z_L of the layers, before the encoder's final LayerNorm if it has one, and
with ``--encoder-fusion-embedding`` the encoder's input z_0 in front: N tensors of ... x C, in any layout,
since no method looks at other positions.
"""

from typing import Any

from torch import Tensor, nn


class EncoderFusion(nn.Module):
    """A method that acts on the encoder's output: N states of ... x C become ... x C.

    A final LayerNorm of the encoder comes after it.

    Args:
        cfg: a :class:`surface_fusion.config.SurfaceFusionConfig`.
    """

    silenceable = False
    """Whether a state of zeros is as if it were not there."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.dim: int = cfg.encoder.embed_dim
        self.states: int = cfg.encoder.layers + cfg.encoder_fusion_embedding

    def forward(self, states: list[Tensor]) -> Tensor:
        """What the decoder attends to, ... x C, from N states of ... x C."""
        raise NotImplementedError

    def start_as_plain(self) -> None:
        """Set the parameters so that the result is the last state, where the method allows it.

        For a plain Transformer's checkpoint that is to be trained further.
        """
