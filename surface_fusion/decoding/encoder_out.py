"""Lazy reordering of the encoder's output in beam search.

fairseq repeats the encoder's output for every hypothesis before the first step and reorders it before each
later one. The fast decoder needs neither, so they are done only when an entry is accessed.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

TIME_FIRST = ("encoder_out", "encoder_states")
"""Entries whose second axis is the batch; in the others it is the first."""


class ReorderedEncoderOut(Mapping[str, list[Tensor]]):
    """The result of fairseq's ``reorder_encoder_out(sentences, rows)``, gathered on first access.

    Args:
        sentences: the encoder's output for S sentences.
        rows: int64, R: the sentence of each hypothesis.
    """

    def __init__(self, sentences: Mapping[str, list[Tensor]], rows: Tensor) -> None:
        self.sentences = sentences
        self.rows = rows
        self._gathered: dict[str, list[Tensor]] = {}

    def __getitem__(self, name: str) -> list[Tensor]:
        if name not in self._gathered:
            axis = 1 if name in TIME_FIRST else 0
            self._gathered[name] = [x.index_select(axis, self.rows) for x in self.sentences[name]]
        return self._gathered[name]

    def __iter__(self) -> Iterator[str]:
        return (name for name in self.sentences if name != "fc_results")  # as fairseq's

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def reordered(self, new_order: Tensor) -> "ReorderedEncoderOut":
        """Row i becomes row ``new_order[i]``."""
        return ReorderedEncoderOut(self.sentences, self.rows.index_select(0, new_order))

    def beam(self) -> int | None:
        """The number of hypotheses per sentence if rows are grouped by sentence, in order; else None.

        It synchronises with the device, so call it once per batch.
        """
        count = len(self.sentences["encoder_padding_mask"][0])
        beam, rest = divmod(len(self.rows), count)
        if rest or not beam:
            return None
        expected = torch.arange(count, device=self.rows.device).repeat_interleave(beam)
        return beam if torch.equal(self.rows, expected) else None
