"""Beam search on the device, with captured CUDA graphs and without waiting for the host in a step.

fairseq's loop launches about fifty operations per step and synchronises three times: of 3.0 ms per step for
128 sentences with a beam of 4 (fp16, H200), the GPU is busy for 1.5 ms. Here a step consists of the decoder,
the output layer and the selection of the best continuations, and it stores back-pointers. The host reads only
the number of unfinished sentences, one step late; the hypotheses are read back at the end.

For S sentences with B hypotheses (lanes) each, of vocabulary V; ``t`` counts steps as fairseq's loop does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surface_fusion.decoding.hypotheses import History, Hypotheses, hypotheses
from surface_fusion.decoding.incremental import DecodeState, FastDecoding
from surface_fusion.decoding.step import DecodeCache, FusedWeights

MOST_LOGITS = 2**27
"""At a time, of both branches: half a GiB in float32; what is computed from them takes twice as much."""


@dataclass(frozen=True)
class Rules:
    """Constraints on the tokens; names and meaning are those of fairseq's ``SequenceGenerator``."""

    eos: int
    never: tuple[int, ...]
    """Tokens that are never selected."""
    unk: int
    unk_penalty: float
    temperature: float
    min_len: int
    max_len: int
    """Tokens before the end."""
    with_attention: bool
    """Whether to keep the last layer's attention to the source."""


class Beams:
    """The state of the search on one cache, which a step reads and writes.

    Attributes:
        left: 1, int64: the number of sentences with fewer than B finished hypotheses.
    """

    @torch.inference_mode(False)
    def __init__(self, cache: DecodeCache, decoder: Any) -> None:
        shape, vocab = (cache.sentences, cache.beam), decoder.output_projection.out_features
        dtype = torch.float32  # fairseq's log-probabilities are, whatever the model is
        if decoder.cfg.surfacefusion is not None:
            dtype = torch.promote_types(cache.own.dtype, dtype)
        integers = cache.rows.new_zeros
        self.cache, self.beam = cache, cache.beam
        self.scores = torch.zeros(shape, dtype=dtype, device=cache.rows.device)
        self.ignored = self.scores > 0
        self.ended = integers(cache.sentences)
        self.left = integers(1)
        self.min_len, self.max_len = integers(1), integers(1)
        self.penalties = self.scores.new_zeros(vocab)
        """Added to a token's log-probability: 0, or -inf where it is never chosen."""
        self.is_eos = self.penalties > 0
        self.ranks = torch.arange(2 * self.beam, device=cache.rows.device)
        self._held: Any = None
        self.history = History(
            integers(cache.length, *shape),
            integers(cache.length, *shape),
            self.scores.new_zeros(cache.length, *shape),
            self.ignored.new_zeros(cache.length, *shape),
            integers(cache.length, *shape),
            self.scores.new_zeros(cache.length, *shape),
            torch.zeros(cache.length, *shape, 0, device=cache.rows.device),
        )

    @torch.inference_mode(False)
    def keep_attention(self) -> None:
        """From here on, where the decoder's last layer gives it."""
        kept = self.history.attention
        if kept.shape[-1] == 0:
            self.history = self.history._replace(attention=kept.new_zeros(*kept.shape[:3], self.cache.source))

    def begin(self, rules: Rules, sentences: int, bos: int) -> None:
        """Before the first step of the first *sentences*, which begin with the token *bos*."""
        self._follow(rules)
        self.scores.zero_()
        self.ignored.zero_()
        self.ended.fill_(self.beam)[:sentences] = 0
        self.cache.tokens.fill_(bos)

    def _follow(self, rules: Rules) -> None:
        self.min_len.fill_(rules.min_len)
        self.max_len.fill_(rules.max_len)
        self.penalties.zero_()[rules.unk] -= rules.unk_penalty
        for token in rules.never:
            self.penalties[token] = -torch.inf
        self.is_eos.zero_()[rules.eos] = True

    def go_on(self, rules: Rules, other: "Beams", sentences: Tensor) -> None:
        """Be where *other* is with its *sentences* (int64) alone, once the cache is."""
        self._follow(rules)
        count = len(sentences)
        for mine, theirs in (
            (self.scores, other.scores),
            (self.ignored, other.ignored),
            (self.cache.tokens.view(-1, self.beam), other.cache.tokens.view(-1, self.beam)),
        ):
            mine[:count].copy_(theirs.index_select(0, sentences))
        self.ended.fill_(self.beam)[:count].copy_(other.ended.index_select(0, sentences))

    def step(
        self,
        model: Any,
        weights: FusedWeights,
        rules: Rules,
        shape: tuple[int, int],
        first: bool,
        static: bool,
    ) -> None:
        """Decode one token and choose, as ``SequenceGenerator._generate`` does between two reorderings.

        Args:
            shape: length and source, as in :meth:`DecodeCache.step`.
            first: all lanes of a sentence are alike: the continuations of one are chosen from.
            static: what is launched must not depend on what is found.
        """
        cache, beam, eos = self.cache, self.beam, self.is_eos
        t = cache.position.clone()
        features, read = cache.step(model.decoder, weights, *shape, rules.with_attention)
        if read is not None:
            read = read.float().view(1, *self.scores.shape, -1)
            self.history.attention[..., : shape[1]].index_copy_(0, t, read)
        penalties = self.penalties.masked_fill(eos & (t < self.min_len), -torch.inf)
        penalties.masked_fill_(~eos & (t >= self.max_len), -torch.inf)
        before, live = self.scores, None
        if not static:
            live = (self.ended < beam).nonzero().flatten()
            features = features.unflatten(0, before.shape).index_select(0, live).flatten(0, 1)
            before = before.index_select(0, live)
        some = max(1, MOST_LOGITS // (2 * beam * len(eos)))
        best, held = [], None
        for rows, totals in zip(features.split(some * beam), before.split(some), strict=True):
            held, *found = _best(model, rules, rows, penalties, totals, first)
            best.append(found)
        scores, chosen = (torch.cat(x) for x in zip(*best, strict=True))
        if live is not None:
            # Otherwise the C library returns the memory to the system, and each step faults it in again.
            self._held = held
            scores = scores.new_zeros(len(self.ended), 2 * beam).index_copy_(0, live, scores)
            chosen = chosen.new_zeros(len(self.ended), 2 * beam).index_copy_(0, live, chosen)
        lanes, tokens = chosen // len(eos), chosen % len(eos)

        ended = tokens.eq(rules.eos) & scores.ne(-torch.inf)
        ends = ended[:, :beam] & ~self.ignored
        passed = torch.cat([ends | self.ignored, ended[:, beam:]], dim=1)
        rank, going_on = (passed * 2 * beam + self.ranks).topk(beam, largest=False)
        after = [x.gather(1, going_on) for x in (lanes, tokens, scores)]
        happened = (*after, ends, lanes[:, :beam], scores[:, :beam])
        for kept, new in zip(self.history[: len(happened)], happened, strict=True):
            kept.index_copy_(0, t, new.unsqueeze(0))
        self.ignored.copy_(rank >= 2 * beam)
        self.ended.add_(ends.sum(dim=1))
        self.left.copy_((self.ended < beam).sum())
        cache.order.copy_((after[0] + cache.rows.view(-1, beam)[:, :1]).flatten())
        cache.tokens.copy_(after[1].flatten())
        self.scores.copy_(after[2])


def _best(
    model: Any, rules: Rules, features: Tensor, penalties: Tensor, scores: Tensor, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The 2 B best continuations of each of S sentences, S x 2 B: their scores, and lane * V + token.

    Args:
        features: of S x B rows.
        scores: S x B, so far.

    Returns:
        Before them those of all continuations.
    """
    logits = model.decoder.output_layer(features)
    if rules.temperature != 1:
        logits = logits / rules.temperature
    log_probs = model.get_normalized_probs((logits, None), log_probs=True)[:, -1]
    totals = log_probs.nan_to_num_(-torch.inf, torch.inf, -torch.inf).add_(penalties)
    totals = totals.unflatten(0, scores.shape)
    # topk's choice among ties depends on the input size: use the same size as fairseq's search.
    among = totals[:, 0].contiguous() if first else totals.add_(scores.unsqueeze(-1)).flatten(1)
    best = among.topk(2 * scores.shape[1])
    return totals, best.values, best.indices


class Search:
    """One batch: caches and graphs of a decoder, driven to the end.

    Args:
        model: whose decoder ``why_not_fast`` lets decode.
        encoder_out: of S sentences.
        beam: B.
    """

    def __init__(self, model: Any, encoder_out: Mapping[str, list[Tensor]], beam: int, rules: Rules) -> None:
        self.model, self.rules = model, rules
        self.decoding: FastDecoding = model.decoder.fast_decoding
        self.sentences = len(encoder_out["encoder_padding_mask"][0])
        self.left = torch.arange(self.sentences)
        """The batch's index of each sentence that is searched."""
        self.state: DecodeState = self.decoding.begin_search(model.decoder, encoder_out, beam)
        self._done: list[tuple[int, Tensor, History]] = []

    def run(self, bos: int) -> Hypotheses:
        """Search until each sentence has B finished hypotheses or the maximum length is reached."""
        state, steps, since = self.state, self.rules.max_len + 1, 0
        beams = self._beams()
        beams.begin(self.rules, self.sentences, bos)
        waiting = Waiting(steps, beams.left)
        for t in range(steps):
            left = waiting.left_before(t)
            if left == 0:
                break
            if self.decoding.must_move(state, left):
                self._keep(beams, since, t)
                unfinished = (beams.ended[: len(self.left)] < state.beam).nonzero().flatten()
                if len(unfinished) == 0:
                    since = t
                    break
                self.left, since = self.left[unfinished.cpu()], t
                self.decoding.move(self.model.decoder, state, unfinished)
                before, beams = beams, self._beams()
                beams.go_on(self.rules, before, unfinished)
            self.decoding.search_step(state, beams, self.model, self.rules)
            waiting.read_after(t, beams.left)
        self._keep(beams, since, state.decoded)
        return hypotheses(self._history(), self.rules.eos)

    def _beams(self) -> Beams:
        lease = self.state.lease
        if lease.beams is None:
            lease.beams = Beams(lease.cache, self.model.decoder)
        if self.rules.with_attention:
            lease.beams.keep_attention()
        return lease.beams

    def _keep(self, beams: Beams, since: int, until: int) -> None:
        """Remember on the CPU what happened on a cache, which others may use from here on."""
        count, source = len(self.left), self.state.source if self.rules.with_attention else 0
        parts = beams.history._replace(attention=beams.history.attention[..., :source])
        history = History(*(x[since:until, :count].to("cpu", copy=True) for x in parts))
        self._done.append((since, self.left, history))

    def _history(self) -> History:
        """Of all sentences; where one was not searched any more, nothing ends."""
        steps = self.state.decoded
        whole = History(*(x.new_zeros(steps, self.sentences, *x.shape[2:]) for x in self._done[0][2]))
        for since, sentences, part in self._done:
            for into, x in zip(whole, part, strict=True):
                into[since : since + len(x), sentences] = x
        return whole


class Waiting:
    """How many sentences are left: on a GPU it is known a step late, so that the GPU need not wait."""

    def __init__(self, steps: int, like: Tensor) -> None:
        self._left = torch.ones(steps, dtype=like.dtype, pin_memory=like.is_cuda)
        self._events: list[torch.cuda.Event] = []

    def read_after(self, t: int, left: Tensor) -> None:
        """Ask for *left* (1) as it is after step *t*."""
        self._left[t : t + 1].copy_(left, non_blocking=True)
        if left.is_cuda:
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(left.device))

    def left_before(self, t: int) -> int | None:
        """What is known before step *t*; None: not yet anything."""
        known = t - 2 if self._events else t - 1
        if known < 0:
            return None
        if self._events:
            self._events[known].synchronize()
        return int(self._left[known])
