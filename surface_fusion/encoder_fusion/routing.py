"""Dynamic routing: output capsules that the states agree on (Dou et al., 2019, https://arxiv.org/abs/1902.05770).

Every state n votes on each of K output capsules of width C/K; T iterations of

    V_{nk} = W_{nk} z_n      C_n = softmax_k(B_n), B = 0 at first
    out_k = squash(sum_n C_{nk} V_{nk})      B_{nk} += out_k . V_{nk}
    squash(s) = |s|^2 / (1 + |s|^2) s / |s|

and the capsules side by side are the result. The routing runs in float32.

On the encoder's output. Parameters: ``N C^2``; 1,572,864 for C = 512 and 6 layers.
"""

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surface_fusion.encoder_fusion.base import EncoderFusion
from surface_fusion.encoder_fusion.registry import register_encoder_fusion
from surface_fusion.ops.precision import at_least_float32


@register_encoder_fusion("routing")
class Routing(EncoderFusion):
    """Routing by agreement between the states' votes.

    Args:
        states, dim: N and C.
        capsules: K.
        iterations: T.

    Attributes:
        votes: N x C x C, the votes of each state on all capsules.
    """

    def __init__(self, states: int, dim: int, capsules: int = 8, iterations: int = 3) -> None:
        super().__init__(states, dim)
        self.capsules, self.iterations = capsules, iterations
        self.votes = nn.Parameter(torch.empty(states, dim, dim))
        self.reset_parameters()

    @classmethod
    def check_options(cls, dim: int, **options: Any) -> None:
        """Capsules have the same width, and there is at least one iteration."""
        capsules, iterations = options["capsules"], options["iterations"]
        if capsules < 1 or dim % capsules:
            raise ValueError(
                f"--routing-capsules {capsules} does not divide --encoder-embed-dim {dim}; choose a number "
                "that does"
            )
        if iterations < 1:
            raise ValueError(f"--routing-iterations {iterations}: routing needs at least 1")

    def reset_parameters(self) -> None:
        """Xavier initialisation of each state's map."""
        bound = (3 / self.dim) ** 0.5
        nn.init.uniform_(self.votes, -bound, bound)

    def forward(self, states: list[Tensor]) -> Tensor:
        """Fuse N states of ... x C into ... x C."""
        votes = [
            at_least_float32(F.linear(state, weight).unflatten(-1, (self.capsules, -1)))
            for state, weight in zip(states, self.votes, strict=True)
        ]
        agreement = [votes[0].new_zeros(votes[0].shape[:-1])] * len(votes)
        capsules = _output_capsules(votes, agreement)
        for _ in range(self.iterations - 1):
            agreement = [b + (capsules * v).sum(-1) for b, v in zip(agreement, votes, strict=True)]
            capsules = _output_capsules(votes, agreement)
        return capsules.flatten(-2).to(states[-1].dtype)

    def layer_shares(self, states: list[Tensor]) -> Tensor:
        """The share of ||W_n|| (Frobenius) in the sum over n: N."""
        norms = self.votes.flatten(1).norm(dim=1)
        return norms / norms.sum()


def _output_capsules(votes: list[Tensor], agreement: list[Tensor]) -> Tensor:
    """... x K x C/K from N votes of that shape and N agreements of ... x K."""
    weighted = (F.softmax(b, dim=-1)[..., None] * v for b, v in zip(agreement, votes, strict=True))
    return squash(reduce(torch.add, weighted))


def squash(x: Tensor) -> Tensor:
    """``|x|^2 / (1 + |x|^2) x / |x|`` along the last axis, zero (gradient too) at zero."""
    square = x.square().sum(-1, keepdim=True)
    return x * (square + torch.finfo(x.dtype).tiny).sqrt() / (1 + square)
