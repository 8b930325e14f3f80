"""Pack a batch of sentence pairs: concatenate the tokens of each side, without padding.

fairseq pads a batch of B sentences to B x T. Here each side has N rows, and rows ``starts[i]`` to
``starts[i + 1]`` are sentence i. No product includes padding, and one number is the shape of a side.

For CUDA graphs that number is rounded up to a *capacity*, and the number of sentences to *slots*. The
remaining rows form sentences of padding tokens, which attend only to themselves and have weight zero in the
loss. So every row belongs to a sentence and is written.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.ops.linear_cross_entropy import LinearCrossEntropy
from surface_fusion.ops.packed_rows import PackedRows


@dataclass(frozen=True)
class PackedBatch:
    """Both sides of a batch.

    Attributes:
        src, tgt: the source, and the shifted target.
        target: the token to predict at each row of *tgt*; padding at padding rows.
    """

    src: PackedRows
    tgt: PackedRows
    target: Tensor


class ForwardResult(NamedTuple):
    """What a forward on a packed batch returns.

    Attributes:
        losses: the losses, detached.
        backward: adds the gradients of all parameters, times its argument (a scalar tensor), to the flat
            gradient; can be called once.
    """

    losses: LinearCrossEntropy
    backward: Callable[[Tensor], None]


def tokens_of(sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Source, shifted target and target of a batch: B x S, B x T, B x T."""
    inputs = sample["net_input"]
    return inputs["src_tokens"], inputs["prev_output_tokens"], sample["target"]


def pack(src_tokens: Tensor, prev_output_tokens: Tensor, target: Tensor, padding_idx: int) -> PackedBatch:
    """Pack a batch; on a GPU this synchronises.

    Args:
        src_tokens: B x S, padded on either side.
        prev_output_tokens, target: B x T, padded on the same side.
    """
    src_keep, keep = src_tokens.ne(padding_idx), target.ne(padding_idx)
    return PackedBatch(_rows(src_tokens, src_keep), _rows(prev_output_tokens, keep), target[keep])


def _rows(matrix: Tensor, keep: Tensor) -> PackedRows:
    tokens, lengths, numbers = matrix[keep], keep.sum(dim=1), torch.arange(len(keep), device=keep.device)
    sentence = numbers.repeat_interleave(lengths, output_size=len(tokens))
    starts = F.pad(lengths.cumsum(0), (1, 0))
    positions = torch.arange(len(tokens), device=tokens.device) - starts[sentence]
    return PackedRows(tokens, sentence, positions, starts)


@dataclass(frozen=True)
class Capacity:
    """The static shape of a packed batch.

    Attributes:
        src, tgt: rows of each side.
        padded: tokens of a side with its padding; also an upper bound of the number of sentences.
    """

    src: int
    tgt: int
    padded: int

    def covers(self, needed: "Capacity") -> bool:
        """Whether a batch that needs the capacity *needed* fits."""
        return self.src >= needed.src and self.tgt >= needed.tgt and self.padded >= needed.padded

    @property
    def cost(self) -> int:
        """Approximate cost of a step, in source rows: decoder and loss cost twice as much as the encoder."""
        return self.src + 2 * self.tgt


PAD_SENTENCES = 32
"""Number of padding sentences that share the remaining rows; each has at least one."""


def capacity_for(sentences: int, src_width: int, tgt_width: int, tgt_rows: int) -> Capacity:
    """The capacity to capture for a batch: its size, rounded up to 1/16 of the padded size.

    Args:
        sentences, src_width, tgt_width: B, S, T.
        tgt_rows: target tokens without padding. For the source, whose number of tokens only the GPU knows,
            B S is a good estimate, because fairseq sorts by source length.
    """
    padded = _up(sentences * max(src_width, tgt_width), 16 * 64)
    src, tgt = (_up(rows + PAD_SENTENCES, padded // 16) for rows in (sentences * src_width, tgt_rows))
    return Capacity(src, tgt, padded)


def _up(size: int, step: int) -> int:
    return -(-size // step) * step


def pack_static(
    src_tokens: Tensor,
    prev_output_tokens: Tensor,
    target: Tensor,
    shape: Tensor,
    capacity: Capacity,
    padding_idx: int,
) -> PackedBatch:
    """Pack a batch into tensors of the size of *capacity*, without a synchronisation.

    Args:
        src_tokens, prev_output_tokens, target: the flattened B x S and B x T matrices, followed by padding
            tokens up to ``capacity.padded``.
        shape: (B, S, T), int64, on the device.
    """
    sentences, src_width, tgt_width = shape.unbind()
    slots = capacity.padded + PAD_SENTENCES

    def pack_side(columns: list[Tensor], width: Tensor, rows: int) -> tuple[PackedRows, Tensor]:
        keep = columns[-1].ne(padding_idx)
        place = torch.where(keep, keep.cumsum(0) - 1, rows)
        packed = [x.new_full((rows + 1,), padding_idx).scatter(0, place, x)[:rows] for x in columns]
        numbers = torch.arange(capacity.padded, device=keep.device)
        lengths = torch.zeros(slots + 1, dtype=torch.int64, device=keep.device)
        lengths.scatter_add_(0, (numbers // width).clamp(max=slots), keep.long())
        # Divide the remaining rows, at least PAD_SENTENCES, evenly into PAD_SENTENCES padding sentences.
        padding_sentences = torch.arange(1, slots + 1, device=keep.device) - sentences
        remaining = padding_sentences.clamp(0, PAD_SENTENCES) * (rows - keep.sum()) // PAD_SENTENCES
        starts = F.pad(lengths[:-1].cumsum(0) + remaining, (1, 0))
        numbers = torch.arange(rows, device=keep.device)
        sentence = torch.searchsorted(starts, numbers, right=True) - 1
        return PackedRows(packed[0], sentence, numbers - starts[sentence], starts), packed[-1]

    src, _ = pack_side([src_tokens], src_width, capacity.src)
    tgt, packed_target = pack_side([prev_output_tokens, target], tgt_width, capacity.tgt)
    return PackedBatch(src, tgt, packed_target)
