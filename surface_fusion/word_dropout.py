"""Word dropout: whole input words are left out in training.

``--source-word-dropout p``, ``--target-word-dropout p``: each word's embedding is zero with probability p and
scaled by ``1 / (1 - p)`` otherwise; its position stays. A source word that is dropped is dropped everywhere:
for the encoder, the surface and layer attention.

The published code drops target words with their positions. On the source side it kept each word with
probability p, so that 0.1 left a tenth of the sentence, replaced words at random, and took the padding mask
from the result; that is mended here.
"""

import torch.nn.functional as F
from torch import Tensor, nn


class WordDropout(nn.Module):
    """Drops rows of ... x C in training.

    Args:
        p: probability of dropping a word, in [0, 1).
    """

    def __init__(self, p: float) -> None:
        super().__init__()
        self.p = p

    def forward(self, x: Tensor) -> Tensor:
        """... x C from ... x C."""
        if not self.training:
            return x
        return x * F.dropout(x.new_ones(*x.shape[:-1], 1), self.p)
