"""DWAtt, depth-wise attention: each position attends over the depths of its own states (2024).

With z_n the N states, z = z_N the last, d their width and static layer positions p_n ~ U(0, 1):

    k_n = W^K p_n + b^K        v_n = LN_n(f_n(z_n))        q = 1 + elu(z + f^Q(z))
    f(x) = W LN(gelu(U x))     h = z + softmax_n(q K^T) V

U is b x d and W d x b with a bottleneck b = d/2; scores are not divided by sqrt(d) (``--dwatt-scaling``
does).

On the encoder's output. Parameters: ``(N + 1) (2 d b + 2 b) + 2 N d + (d_pos + 1) d``; 1,857,536 for d =
512 and 6 layers, 26,314,752 for RoBERTa-large (d = 1024, 24 layers; the paper prints 26.33 million).
"""

from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surface_fusion.encoder_fusion.base import EncoderFusion
from surface_fusion.encoder_fusion.registry import register_encoder_fusion
from surface_fusion.ops.precision import accumulation_dtype


class Bottleneck(nn.Module):
    """``f(x) = W LN(gelu(U x))``: ... x d to ... x d, with b columns inside."""

    def __init__(self, dim: int, inner: int) -> None:
        super().__init__()
        self.down = nn.Linear(dim, inner, bias=False)
        self.norm = nn.LayerNorm(inner)
        self.up = nn.Linear(inner, dim, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        """Apply the map to *x*, ... x d."""
        return self.up(self.norm(F.gelu(self.down(x))))


@register_encoder_fusion("dwatt")
class DWAtt(EncoderFusion):
    """Attention over depth, added to the last state.

    Args:
        states, dim: N and d.
        bottleneck: b; 0 is d/2.
        d_pos: width of the layer positions.
        scaling: divide the scores by sqrt(d).
    """

    positions: Tensor

    def __init__(
        self, states: int, dim: int, bottleneck: int = 0, d_pos: int = 24, scaling: bool = False
    ) -> None:
        super().__init__(states, dim)
        bottleneck = bottleneck or dim // 2
        self.scale = dim**-0.5 if scaling else 1.0
        self.register_buffer("positions", torch.rand(states, d_pos))
        self.key: Any = nn.Linear(d_pos, dim)
        self.query: Any = Bottleneck(dim, bottleneck)
        self.values = nn.ModuleList(Bottleneck(dim, bottleneck) for _ in range(states))
        self.norms = nn.ModuleList(nn.LayerNorm(dim) for _ in range(states))

    @classmethod
    def check_options(cls, dim: int, **options: Any) -> None:
        """Widths are positive."""
        bottleneck, d_pos = options["bottleneck"], options["d_pos"]
        if bottleneck < 0 or d_pos < 1:
            raise ValueError(
                f"--dwatt-bottleneck {bottleneck} --dwatt-d-pos {d_pos}: widths are positive (a bottleneck "
                "of 0 is half the encoder's width)"
            )

    def reset_parameters(self) -> None:
        """Draw the positions from U(0, 1); the submodules as torch does."""
        self.positions.uniform_()
        super().reset_parameters()

    def forward(self, states: list[Tensor]) -> Tensor:
        """Fuse N states of ... x C into ... x C."""
        weights = self.weights(states[-1]).split(1, dim=-1)
        terms = zip(weights, self.norms, self.values, states, strict=True)
        return reduce(torch.add, (weight * norm(value(z)) for weight, norm, value, z in terms), states[-1])

    def weights(self, last: Tensor) -> Tensor:
        """Attention weights of each position over the depths: ... x N, from the last state."""
        query = 1 + F.elu(last + self.query(last))
        scores = self.scale * (query @ self.key(self.positions).t())
        return F.softmax(scores, dim=-1, dtype=accumulation_dtype(scores.dtype)).to(last.dtype)

    def layer_shares(self, states: list[Tensor]) -> Tensor:
        """Attention weights over the depths: ... x N."""
        return self.weights(states[-1])

    def start_as_plain(self) -> None:
        """Values of zero."""
        for norm in self.norms:
            for parameter in norm.parameters():
                nn.init.zeros_(parameter)
