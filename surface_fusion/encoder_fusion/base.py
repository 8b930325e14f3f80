"""Base class of encoder layer fusion: a module that maps the encoder's states to the decoder's memory.

States are the outputs z_1 ... z_L of the layers, before the encoder's final LayerNorm if it has one, preceded
with ``--encoder-fusion-embedding`` by the encoder's input z_0: N tensors of ... x C, in any layout, because
all methods act on each position separately.
"""

from typing import Any

from torch import Tensor, nn


class EncoderFusion(nn.Module):
    """A method that acts on the encoder's output: N states of ... x C become ... x C.

    A final LayerNorm of the encoder comes after it.

    Args:
        cfg: a :class:`surface_fusion.config.model.SurfaceFusionConfig`.
    """

    silenceable = False
    """Whether a state of zeros has no effect on the result."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.dim: int = cfg.encoder.embed_dim
        self.states: int = cfg.encoder.layers + cfg.encoder_fusion_embedding

    def forward(self, states: list[Tensor]) -> Tensor:
        """Fuse N states of ... x C into the decoder's memory, ... x C."""
        raise NotImplementedError

    def start_as_plain(self) -> None:
        """Initialise so that the result is the last state, if the method allows it.

        Called when a plain Transformer's checkpoint is loaded to train it with fusion.
        """
