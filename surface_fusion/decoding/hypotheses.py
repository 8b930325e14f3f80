"""The back-pointers and scores of a beam search, and the finished hypotheses reconstructed from them.

For S sentences with B hypotheses (lanes) each; ``t`` counts steps as fairseq's loop does.
"""

from typing import NamedTuple

import torch
from torch import Tensor


class History(NamedTuple):
    """The records of T steps, T x S x B each, except the last field."""

    lanes: Tensor
    """int64: back-pointer, the lane that each hypothesis continues."""
    tokens: Tensor
    """int64: the token it appends."""
    totals: Tensor
    """Its score."""
    ends: Tensor
    """bool: whether the candidate of this rank ends a hypothesis."""
    end_lanes: Tensor
    """int64: the lane of that candidate."""
    end_totals: Tensor
    """With what score."""
    attention: Tensor
    """float32, T x S x B x source: what each hypothesis read before it was continued; source 0: not kept."""


class Hypotheses(NamedTuple):
    """Those of all sentences that have ended, N of up to T tokens; on the CPU."""

    sentence: Tensor
    """int64, N: whose; those of one sentence in the order in which fairseq's search finds them."""
    length: Tensor
    """int64, N: with the end."""
    tokens: Tensor
    """int64, N x T; behind a hypothesis's end there is anything."""
    totals: Tensor
    """N x T: the score after each token."""
    attention: Tensor
    """N x T x source: where each token was chosen from; source 0: not kept."""


def hypotheses(history: History, eos: int) -> Hypotheses:
    """The first B hypotheses of each sentence that end in *history*, T x S x B."""
    lanes, tokens, totals, ends, end_lanes, end_totals, attention = history
    steps, sentences, beam = ends.shape
    in_order = ends.transpose(0, 1).reshape(sentences, -1)
    first = in_order & (in_order.cumsum(dim=1) <= beam)
    sentence, when = first.nonzero().unbind(1)
    last, rank = when // beam, when % beam
    lane = end_lanes[last, sentence, rank]
    found_tokens = torch.full((len(sentence), steps), eos)
    found_totals = end_totals[last, sentence, rank].unsqueeze(1).repeat(1, steps)
    readers = lane.unsqueeze(1).repeat(1, steps)
    for t in reversed(range(steps - 1)):
        before = t < last
        chosen = t, sentence, lane
        found_tokens[:, t] = torch.where(before, tokens[chosen], eos)
        found_totals[:, t] = torch.where(before, totals[chosen], found_totals[:, t])
        readers[:, t] = lane = torch.where(before, lanes[chosen], lane)
    read = attention[torch.arange(steps), sentence.unsqueeze(1), readers]
    return Hypotheses(sentence, last + 1, found_tokens, found_totals, read)
