"""Detect sentences that contain the symbol ``<pad>`` as a word.

fairseq detects padding by token id, so a literal ``<pad>`` in the text is masked. In a source it can be
dropped. In a target it is not predicted but still occupies an input position; packed rows cannot express
that, so such batches use the regular modules.
"""

from collections.abc import Callable
from typing import Any

KEY = "literal_padding"
"""Key of a batch: whether a target sentence contains ``<pad>`` as a word."""


def mark(
    collate: Callable[..., dict[str, Any]], samples: Any, pad_idx: int, *args: Any, **kwargs: Any
) -> dict[str, Any]:
    """fairseq's ``collate`` of sentence pairs; also records whether a target contains ``<pad>``.

    Checked in ``collate``, where the batch is still on the CPU; on a GPU it would force a synchronisation.
    """
    batch = collate(samples, pad_idx, *args, **kwargs)
    if batch.get("target") is not None and "prev_output_tokens" in batch["net_input"]:
        batch[KEY] = _holds(batch, pad_idx)
    return batch


def in_target(batch: dict[str, Any], pad_idx: int) -> bool:
    """Whether a target sentence of *batch* contains ``<pad>``; computed if :func:`mark` was not called."""
    return bool(batch[KEY]) if KEY in batch else _holds(batch, pad_idx)


def _holds(batch: dict[str, Any], pad_idx: int) -> bool:
    """Compare the padding masks: a literal ``<pad>`` is one position later in the input than the target."""
    inputs = batch["net_input"]["prev_output_tokens"]
    return not inputs.ne(pad_idx).equal(batch["target"].ne(pad_idx))
