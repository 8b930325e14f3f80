"""The back-pointers and scores of a beam search, and the finished hypotheses reconstructed from them.

Shapes are those of S sentences with B beams each; ``t`` counts steps as fairseq's loop does.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class History(NamedTuple):
    """The records of T steps, T x S x B each, except *attention*."""

    back_pointers: Tensor
    """int64: the beam that each hypothesis continues."""
    tokens: Tensor
    """int64: the token that it appends."""
    scores: Tensor
    """Its score: the sum of the log-probabilities so far."""
    finished: Tensor
    """bool: whether the candidate of this rank ends a hypothesis."""
    finished_beams: Tensor
    """int64: the beam that this candidate continues."""
    finished_scores: Tensor
    """Its score."""
    attention: Tensor
    """float32, T x S x B x source: of the decoder's step *t*, before the selection; source 0: not stored."""


class Hypotheses(NamedTuple):
    """N finished hypotheses of at most T tokens, on the CPU."""

    sentence: Tensor
    """int64, N: the sentence of each; within a sentence, in the order in which fairseq's search ends them."""
    length: Tensor
    """int64, N: number of tokens, including ``</s>``."""
    tokens: Tensor
    """int64, N x T; undefined after the length."""
    scores: Tensor
    """N x T: the score after each token."""
    attention: Tensor
    """N x T x source: of the step that predicted each token; source 0: not stored."""


def trace_back(history: History, eos: int) -> Hypotheses:
    """Reconstruct the first B finished hypotheses of each sentence by following the back-pointers."""
    steps, sentences, beam = history.finished.shape
    in_order = history.finished.transpose(0, 1).reshape(sentences, -1)
    first = in_order & (in_order.cumsum(dim=1) <= beam)
    sentence, flat_step = first.nonzero().unbind(1)
    last, rank = flat_step // beam, flat_step % beam
    current = history.finished_beams[last, sentence, rank]
    tokens = torch.full((len(sentence), steps), eos)
    scores = history.finished_scores[last, sentence, rank].unsqueeze(1).repeat(1, steps)
    beams = current.unsqueeze(1).repeat(1, steps)
    for t in reversed(range(steps - 1)):
        before = t < last
        index = t, sentence, current
        tokens[:, t] = torch.where(before, history.tokens[index], eos)
        scores[:, t] = torch.where(before, history.scores[index], scores[:, t])
        beams[:, t] = current = torch.where(before, history.back_pointers[index], current)
    attention = history.attention[torch.arange(steps), sentence.unsqueeze(1), beams]
    return Hypotheses(sentence, last + 1, tokens, scores, attention)
