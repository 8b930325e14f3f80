"""Repair ``--diverse-beam-groups``, ``--no-repeat-ngram-size`` and ``--replace-unk``."""

from collections.abc import Callable
from typing import Any


def map_sentence_ids(
    step_groups: Callable[..., Any],
    search: Any,
    step: int,
    lprobs: Any,
    scores: Any,
    prev_output_tokens: Any = None,
    original_batch_idxs: Any = None,
) -> Any:
    """fairseq's ``DiverseBeamSearch.step``; maps ids of sentences to their rows in the first step."""
    if original_batch_idxs is not None:
        if step == 0:
            search.batch_ids = original_batch_idxs
        original_batch_idxs = original_batch_idxs[:, None].eq(search.batch_ids[None, :]).int().argmax(dim=1)
    return step_groups(search, step, lprobs, scores, prev_output_tokens, original_batch_idxs)


def block_written_ngrams(
    block: Callable[..., Any], module: Any, tokens: Any, lprobs: Any, bsz: int, beam_size: int, step: int
) -> Any:
    """fairseq's ``NGramRepeatBlock._no_repeat_ngram``, without the unused columns after the current step."""
    return block(module, tokens[:, : step + 1], lprobs, bsz, beam_size, step)


def accept_replace_unk_alone(load_align_dict: Callable[..., Any], replace_unk: str | None) -> Any:
    """fairseq's ``load_align_dict``; reads the default ``"@@ "`` of ``--replace-unk`` as no dictionary."""
    return load_align_dict("" if replace_unk == "@@ " else replace_unk)
