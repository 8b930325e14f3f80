"""Fix options of beam search."""

from collections.abc import Callable
from typing import Any

from fairseq import search, utils
from fairseq.ngram_repeat_block import NGramRepeatBlock

from surface_fusion.compat.patching import wrap


def fix_diverse_beam() -> None:
    """Fix ``--diverse-beam-groups``.

    fairseq indexes rows by original sentence ids after finished sentences are removed.
    """

    def step(
        original: Callable[..., Any],
        self: Any,
        step: int,
        lprobs: Any,
        scores: Any,
        prev_output_tokens: Any = None,
        original_batch_idxs: Any = None,
    ) -> Any:
        if original_batch_idxs is not None:
            if step == 0:
                self.batch_ids = original_batch_idxs
            original_batch_idxs = original_batch_idxs[:, None].eq(self.batch_ids[None, :]).int().argmax(dim=1)
        return original(self, step, lprobs, scores, prev_output_tokens, original_batch_idxs)

    wrap(search.DiverseBeamSearch, "step", step)


def fix_ngram_blocking() -> None:
    """Fix ``--no-repeat-ngram-size``: fairseq also searches the unused columns after the current step.

    https://github.com/facebookresearch/fairseq/issues/5206
    """

    def block(
        original: Callable[..., Any], self: Any, tokens: Any, lprobs: Any, bsz: int, beam_size: int, step: int
    ) -> Any:
        return original(self, tokens[:, : step + 1], lprobs, bsz, beam_size, step)

    wrap(NGramRepeatBlock, "_no_repeat_ngram", block)


def fix_replace_unk() -> None:
    """Accept ``--replace-unk`` without a dictionary: fairseq opens its default ``"@@ "`` as a file."""

    def load(original: Callable[..., Any], replace_unk: str | None) -> Any:
        return original("" if replace_unk == "@@ " else replace_unk)

    wrap(utils, "load_align_dict", load)
