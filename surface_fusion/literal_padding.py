"""Sentences that hold the symbol ``<pad>`` as a word.

fairseq knows padding by its symbol. A ``<pad>`` within a source sentence is read by nothing, as padding is
not, so that packed rows leave it out. One within a target sentence is not predicted, but it is an input at
the next position: it is no key of the attention, and the position after it predicts as any other. Packed
rows cannot express that; such a batch goes through the modules.
"""

from collections.abc import Callable
from typing import Any

KEY = "literal_padding"
"""Of a batch: whether a target sentence holds ``<pad>`` as a word."""


def mark(
    collate: Callable[..., dict[str, Any]], samples: Any, pad_idx: int, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """fairseq's ``collate`` of sentence pairs; the batch also says whether a target holds ``<pad>``.

    There it is on the CPU. A training step on a GPU would wait for the answer.
    """
    batch = collate(samples, pad_idx, *args, **kwargs)
    if batch.get("target") is not None and "prev_output_tokens" in batch["net_input"]:
        batch[KEY] = _holds(batch, pad_idx)
    return batch


def in_target(batch: dict[str, Any], pad_idx: int) -> bool:
    """Whether a target sentence of *batch* holds ``<pad>``; looks where :func:`mark` has not."""
    return bool(batch[KEY]) if KEY in batch else _holds(batch, pad_idx)


def _holds(batch: dict[str, Any], pad_idx: int) -> bool:
    """A word ``<pad>`` is at one position of the target and at the next of the decoder's input."""
    inputs = batch["net_input"]["prev_output_tokens"]
    return not inputs.ne(pad_idx).equal(batch["target"].ne(pad_idx))
