"""One side of a batch without padding: the tokens of all sentences, concatenated."""

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass(frozen=True)
class PackedRows:
    """One side of a batch; rows ``starts[i]`` to ``starts[i + 1]`` are sentence i.

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
    def padding(self) -> "Padding":
        """The padded matrix of these rows; synchronises to read the length of the longest sentence."""
        lengths = self.starts.diff()
        width = int(lengths.max())
        columns = torch.arange(width, device=lengths.device)
        rows = (self.starts[:-1, None] + columns).clamp(max=len(self.sentence) - 1)
        mask = columns < lengths[:, None]
        return Padding(mask, rows.flatten(), self.sentence * width + self.positions)


class Padding(NamedTuple):
    """The B x T matrix of a side with padding, and where its N rows are in it.

    Attributes:
        mask: bool, B x T, false at padding.
        row: the row at each of the B T positions; any row at padding.
        position: the position of each of the N rows.
    """

    mask: Tensor
    row: Tensor
    position: Tensor

    @property
    def empty(self) -> bool:
        """Whether all sentences have the same length, so that there is no padding."""
        return self.position.numel() == self.mask.numel()
