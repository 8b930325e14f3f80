"""One side of a batch without padding: the tokens of all sentences, concatenated.

Rows ``starts[i]`` to ``starts[i + 1]`` are sentence i. :class:`Places` maps them to the B x T matrix that
fairseq's modules use.
"""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRows:
    """One side of a batch.

    Attributes:
        tokens: N.
        sentence: index of each row's sentence, N.
        positions: position in the sentence from 0, N.
        starts: first row of each sentence and the end of the last, slots + 1.
    """

    tokens: Tensor
    sentence: Tensor
    positions: Tensor
    starts: Tensor

    @cached_property
    def places(self) -> "Places":
        """The places of the rows in a padded batch; synchronises to read the longest sentence."""
        lengths = self.starts.diff()
        width = int(lengths.max())
        columns = torch.arange(width, device=lengths.device)
        rows = (self.starts[:-1, None] + columns).clamp(max=len(self.sentence) - 1)
        real = columns < lengths[:, None]
        return Places(real, rows.flatten(), self.sentence * width + self.positions, len(self.sentence))


class Places(NamedTuple):
    """The B x T matrix that rows have their places in if padded.

    Attributes:
        real: bool, B x T, false at padding.
        row: B T, the row of each place, and some row at padding.
        place: N, the place of each row.
        rows: N.
    """

    real: Tensor
    row: Tensor
    place: Tensor
    rows: int

    @property
    def full(self) -> bool:
        """Whether there is no padding."""
        return self.rows == self.real.numel()
