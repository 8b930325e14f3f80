"""Rows of sentences of given lengths, as ``packed.py`` makes them."""

from collections.abc import Sequence

import torch

from surface_fusion.ops.packed_rows import PackedRows


def rows_of(lengths: Sequence[int], device: str = "cpu") -> PackedRows:
    """Sentences of these lengths; tokens are of no account."""
    counts = torch.tensor(lengths, device=device)
    starts = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    sentence = torch.arange(len(counts), device=device).repeat_interleave(counts)
    numbers = torch.arange(len(sentence), device=device)
    return PackedRows(numbers, sentence, numbers - starts[sentence], starts)
