"""DLCL, dynamic linear combination of layers (Wang et al., 2019, https://arxiv.org/abs/1906.01787).

    pre-norm:   x_{l+1} = sum_k W_k^{l+1} LN_k(y_k)
    post-norm:  x_{l+1} = LN_{l+1}(sum_k W_k^{l+1} y_k)

over k = 0 ... l, y_0 being the embedding layer. W^{l+1} are l + 1 numbers, all 1/(l+1) at first.
(Post-norm, layer 1 reads y_0 without a LayerNorm.)

Inside encoder and decoder. Parameters of a stack of L layers: ``(L + 1)(L + 2)/2`` numbers (L fewer
with ``--no-encoder-fusion-embedding``) and ``L + 1`` LayerNorms (post-norm: L) of 2 C; 6,172 for C = 512 and
6 layers post-norm, twice that for both stacks.
"""

from functools import reduce

import torch
from torch import Tensor, nn

from surface_fusion.encoder_fusion.layer_combination import Combination
from surface_fusion.encoder_fusion.registry import register_encoder_fusion


@register_encoder_fusion("dlcl")
class DLCL(Combination):
    """A learned weighted sum of all outputs so far.

    Attributes:
        weight: the rows W^1 ... W^{L+1} one after another.
    """

    def __init__(self, layers: int, dim: int, normalize_before: bool, embedding: bool) -> None:
        super().__init__(layers, dim, normalize_before, embedding)
        self.weight = nn.Parameter(torch.empty(sum(self.sizes)))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(layers + normalize_before))
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Each layer reads the average of all outputs before it."""
        super().reset_parameters()
        for depth in range(self.layers + 1):
            self.row(depth).fill_(1 / self.sizes[depth])

    def keep(self, y: Tensor, depth: int) -> Tensor:
        """y, pre-norm through the LayerNorm of its depth."""
        return self.norms[depth](y) if self.normalize_before else y

    def combine(self, kept: list[Tensor], depth: int) -> Tensor:
        """x_{l+1}, ... x C."""
        row = self.row(depth).to(kept[0].dtype).unbind()
        total = reduce(torch.add, (weight * y for weight, y in zip(row, kept, strict=True)))
        return total if self.normalize_before or depth == 0 else self.norms[depth - 1](total)

    def row(self, depth: int) -> Tensor:
        """W^{l+1} for l = *depth*."""
        return self.weight.split(self.sizes)[depth]

    def layer_shares(self) -> Tensor:
        """Weight of output k in the input of layer l + 1, in row k and column l; NaN if it is not read."""
        shares = self.weight.new_full((self.layers + 1, self.layers + 1), float("nan"))
        for depth, size in enumerate(self.sizes):
            shares[depth + 1 - size : depth + 1, depth] = self.row(depth)
        return shares
