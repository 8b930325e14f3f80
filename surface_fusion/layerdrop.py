"""LayerDrop that keeps depth (Fan et al., 2019, https://arxiv.org/abs/1909.11556).

fairseq's list leaves dropped layers out of the loop, so that "the output of layer 5" is at another
place in each step, or nowhere. Here a dropped layer is a pass-through: the stream after depth i
always exists, run or skipped.
"""

from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq.modules import LayerDropModuleList
from torch import Tensor, nn


def skip_encoder_layer(x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """An encoder layer that was dropped."""
    return x


def skip_decoder_layer(x: Tensor, *args: Any, **kwargs: Any) -> tuple[Tensor, None, None]:
    """A decoder layer that was dropped: no attention, no state."""
    return x, None, None


class DepthKeepingLayerDrop(LayerDropModuleList):
    """Yields every layer in training, *skip* in place of the dropped ones.

    The same layers are dropped as by fairseq's list under the same seed.
    """

    def __init__(self, layers: LayerDropModuleList, skip: Callable[..., Any]) -> None:
        super().__init__(layers.p, nn.ModuleList.__iter__(layers))
        self.skip = skip

    def __iter__(self) -> Iterator[Any]:
        dropped = torch.empty(len(self)).uniform_() <= self.p
        for i, layer in enumerate(nn.ModuleList.__iter__(self)):
            yield self.skip if self.training and dropped[i] else layer
