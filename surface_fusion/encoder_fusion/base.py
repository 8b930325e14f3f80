"""Base class of all methods of encoder layer fusion, and of those that act on the encoder's output.

States are the outputs z_1 ... z_L of the encoder's layers, before its final LayerNorm if it has one, preceded
with ``--encoder-fusion-embedding`` by the encoder's input z_0: N tensors of ... x C, in any layout. A method
must treat each position separately: the modules pass S x B x C, training without padding passes rows x C.

The other two places have base classes of their own: ``LayerAttention`` and ``Combination``.
"""

from typing import Any, ClassVar

from torch import Tensor, nn


class FusionMethod(nn.Module):
    """What the methods of all places have in common. Flags, help, errors and analyses read the attributes."""

    place: ClassVar[str]
    """Where it acts, in the words of ``--help``; set by the base class of the place."""
    name: ClassVar[str]
    """Value of ``--encoder-fusion``; set by :func:`~.registry.register_encoder_fusion`."""
    silenceable: ClassVar[bool] = False
    """Whether ``analyse ablate`` applies: a state of zeros has no effect on the result."""
    any_depth: ClassVar[bool] = False
    """Whether no parameter depends on the number of layers, so that layers can be pruned."""
    adds_layers: ClassVar[bool] = False
    """Whether there is no module: ``--extra-encoder-layers`` more layers are built into the encoder."""
    layer_shares: Any = None
    """A method that returns the weights of the layers for ``analyse layers``; None if there are none."""

    @classmethod
    def check_options(cls, dim: int, **options: Any) -> None:
        """Raise ValueError, with a line for the user, if no module of width *dim* can have these options."""

    def reset_parameters(self) -> None:
        """Initialise all parameters and buffers again; on the meta device, after ``to_empty()``.

        The default resets the submodules that have a ``reset_parameters``. A method with parameters or
        buffers of its own extends it.
        """
        part: Any
        for part in self.modules():
            if part is not self and hasattr(part, "reset_parameters"):
                part.reset_parameters()

    def start_as_plain(self) -> None:
        """Initialise so that the result is the last state, if the method allows it.

        Called when a plain Transformer's checkpoint is loaded to train it with fusion.
        """


class EncoderFusion(FusionMethod):
    """A method that acts on the encoder's output: N states of ... x C become ... x C.

    A final LayerNorm of the encoder comes after it. A subclass may define ``layer_shares(states)``, the
    weights of the states: N, or ... x N if they depend on the position.

    Args:
        states, dim: number N of states and their width C.
    """

    place = "on the encoder's output"

    def __init__(self, states: int, dim: int) -> None:
        super().__init__()
        self.states, self.dim = states, dim

    def forward(self, states: list[Tensor]) -> Tensor:
        """Fuse N states of ... x C into what the decoder attends to, ... x C."""
        raise NotImplementedError
