"""Word dropout: drop whole input words in training.

``--source-word-dropout p``, ``--target-word-dropout p``: each word's embedding is zero with probability p and
scaled by ``1 / (1 - p)`` otherwise; its position embedding is kept. A source word is dropped for the encoder,
the surface and layer attention alike.
The published code does otherwise, see ``docs/differences.md``.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class WordDropout(nn.Module):
    """Drops rows of a ... x C tensor in training.

    Args:
        p: probability of dropping a word, in [0, 1).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """Drop rows of *x*, ... x C; returns a tensor of the same shape."""
        if not self.training:
            return x
        return x * F.dropout(x.new_ones(*x.shape[:-1], 1), self.p)
