"""LayerDrop that keeps depth (Fan et al., 2019, https://arxiv.org/abs/1909.11556).

fairseq's list skips dropped layers, so the index of "the output of layer 5" changes from step to step. Here a
dropped layer is a pass-through, so the output after depth i always exists.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq.modules import LayerDropModuleList
from torch import Tensor, nn


def skip_encoder_layer(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Replacement of a dropped encoder layer: returns its input."""
    return x


def skip_decoder_layer(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
    """Replacement of a dropped decoder layer: returns its input, no attention and no state."""
    return x, None, None


class DepthKeepingLayerDrop(LayerDropModuleList):
    """A list that yields *skip* for the layers that fairseq's list drops in training, under the same seed."""

    def __init__(self, layers: LayerDropModuleList, skip: Callable[..., Any]) -> None:
        super().__init__(layers.p, nn.ModuleList.__iter__(layers))
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        dropped = torch.empty(len(self)).uniform_() <= self.p
        for i, layer in enumerate(nn.ModuleList.__iter__(self)):
            yield self.skip if self.training and dropped[i] else layer
