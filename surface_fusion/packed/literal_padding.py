"""Detect sentences that contain the symbol ``<pad>`` as a word.

fairseq detects padding by token id, so a literal ``<pad>`` in the text is masked. In a source it can be
dropped. In a target it is not predicted but still occupies an input position; packed rows cannot express
that, so such batches use the regular modules.
"""

from typing import Any

KEY = "literal_padding"
"""Key of a batch: whether a target sentence contains ``<pad>`` as a word."""


def mark(batch: dict[str, Any], pad_idx: int) -> None:
    """Record in *batch* whether a target sentence contains ``<pad>``.

    Call it while the batch is on the CPU; on a GPU the comparison forces a synchronisation.
    """
    pairs = batch.get("target") is not None and "prev_output_tokens" in batch.get("net_input", {})
    if pairs and KEY not in batch:
        batch[KEY] = _contains_padding(batch, pad_idx)


def in_target(batch: dict[str, Any], pad_idx: int) -> bool:
    """Whether a target sentence of *batch* contains ``<pad>``; computed if :func:`mark` was not called."""
    return bool(batch[KEY]) if KEY in batch else _contains_padding(batch, pad_idx)


def _contains_padding(batch: dict[str, Any], pad_idx: int) -> bool:
    """Compare the padding masks: a literal ``<pad>`` is one position later in the input than the target."""
    inputs = batch["net_input"]["prev_output_tokens"]
    return not inputs.ne(pad_idx).equal(batch["target"].ne(pad_idx))
