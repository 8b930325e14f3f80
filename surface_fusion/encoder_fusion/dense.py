"""DenseNMT: each layer reads all earlier outputs side by side, through a linear map (Shen et al., 2018,
https://arxiv.org/abs/1806.00722).

    x_{l+1} = W^{l+1} [y_0; ...; y_l] = sum_k W_k^{l+1} y_k,  l = 1 ... L

y_0 is the embedding layer, which layer 1 reads directly. The maps are initialised as the identity of the
latest output, so the model initially equals the plain Transformer.

Inside encoder and decoder. Parameters of a stack of L layers: ``(L (L + 3) / 2) C^2``; 7,077,888 for C =
512 and 6 layers, twice that for both stacks; with ``--no-encoder-fusion-embedding`` L C^2 less each.
"""

from functools import reduce

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surface_fusion.encoder_fusion.layer_combination import Combination
from surface_fusion.encoder_fusion.registry import register_encoder_fusion


@register_encoder_fusion("dense")
class Dense(Combination):
    """A linear map of all outputs so far, computed without concatenating them.

    Attributes:
        maps: of the layers 2 ... L and of the result: (l + 1) x C x C.
    """

    def __init__(self, layers: int, dim: int, normalize_before: bool, embedding: bool) -> None:
        super().__init__(layers, dim, normalize_before, embedding)
        self.maps = nn.ParameterList(torch.empty(size, dim, dim) for size in self.sizes[1:])
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """The identity of the latest output."""
        for weight in self.maps:
            weight.zero_()[-1].fill_diagonal_(1)

    def combine(self, kept: list[Tensor], depth: int) -> Tensor:
        """x_{l+1}, ... x C."""
        if depth == 0:
            return kept[0]
        maps = self.maps[depth - 1].unbind()
        return reduce(torch.add, (F.linear(y, weight) for y, weight in zip(kept, maps, strict=True)))
