"""Beam search on the device, in captured CUDA graphs, without waiting for the host within a step.

fairseq's loop launches about fifty operations per step and synchronises three times: of 3.0 ms per step for
128 sentences with a beam of 4 (fp16, H200), the GPU is busy for 1.5 ms. Here a step consists of the decoder,
the output layer and the selection of the best continuations, and it stores back-pointers. The host reads only
the number of unfinished sentences, one step late; the hypotheses are reconstructed at the end.

Shapes are those of S sentences with B beams each and a vocabulary of V; ``t`` counts steps as fairseq's loop
does.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from surface_fusion.decoding.cache import DecodeCache, FusedWeights, copy_selected
from surface_fusion.decoding.hypotheses import History, Hypotheses, trace_back
from surface_fusion.decoding.incremental import DecodeState, FastDecoding
from surface_fusion.decoding.step import decode_step
from surface_fusion.ops.precision import accumulation_dtype

MAX_LOGITS = 2**27
"""Most logits computed at a time: half a GiB in float32; their log-probabilities take twice as much."""


@dataclass(frozen=True)
class SearchOptions:
    """The options of a search; names and meaning are those of fairseq's ``SequenceGenerator``."""

    eos: int
    suppressed: tuple[int, ...]
    """Tokens that are never selected."""
    unk: int
    unk_penalty: float
    temperature: float
    min_len: int
    max_len: int
    """Maximum number of tokens before ``</s>``."""
    with_attention: bool
    """Whether to store the last layer's attention to the source."""


class BeamState:
    """The state of a search on one cache, read and written by each step.

    Attributes:
        remaining: 1, int64: the number of sentences with fewer than B finished hypotheses.
    """

    @torch.inference_mode(False)
    def __init__(self, cache: DecodeCache, decoder: Any) -> None:
        shape, vocab = (cache.sentences, cache.beam), decoder.output_projection.out_features
        # As fairseq's log-probabilities: without a surface float32, whatever the model's type.
        dtype = cache.self_kv.dtype if decoder.cfg.surfacefusion is not None else torch.float32
        integers = cache.rows.new_zeros
        self.cache, self.beam = cache, cache.beam
        self.scores = torch.zeros(shape, dtype=accumulation_dtype(dtype), device=cache.rows.device)
        self.ignored = self.scores > 0
        """Beams that hold no hypothesis any more (fairseq's ``cands_to_ignore``)."""
        self.num_finished = integers(cache.sentences)
        self.remaining = integers(1)
        self.min_len, self.max_len = integers(1), integers(1)
        self.penalties = self.scores.new_zeros(vocab)
        """Added to each token's log-probability: 0, or -inf for tokens that are never selected."""
        self.is_eos = self.penalties > 0
        self.ranks = torch.arange(2 * self.beam, device=cache.rows.device)
        self._last_log_probs: Tensor | None = None
        self.history = History(
            back_pointers=integers(cache.length, *shape),
            tokens=integers(cache.length, *shape),
            scores=self.scores.new_zeros(cache.length, *shape),
            finished=self.ignored.new_zeros(cache.length, *shape),
            finished_beams=integers(cache.length, *shape),
            finished_scores=self.scores.new_zeros(cache.length, *shape),
            attention=torch.zeros(cache.length, *shape, 0, device=cache.rows.device),
        )

    @torch.inference_mode(False)
    def allocate_attention(self) -> None:
        """Allocate the history's attention, unless it is there."""
        attention = self.history.attention
        if attention.shape[-1] == 0:
            attention = attention.new_zeros(*attention.shape[:3], self.cache.source)
            self.history = self.history._replace(attention=attention)

    def reset(self, options: SearchOptions, sentences: int, bos: int) -> None:
        """Prepare the first step of *sentences* sentences, whose hypotheses start with the token *bos*."""
        self._set_options(options)
        self.scores.zero_()
        self.ignored.zero_()
        self.num_finished.fill_(self.beam)[:sentences] = 0
        self.cache.tokens.fill_(bos)

    def _set_options(self, options: SearchOptions) -> None:
        self.min_len.fill_(options.min_len)
        self.max_len.fill_(options.max_len)
        self.penalties.zero_()[options.unk] -= options.unk_penalty
        for token in options.suppressed:
            self.penalties[token] = -torch.inf
        self.is_eos.zero_()[options.eos] = True

    def copy_from(self, options: SearchOptions, other: "BeamState", sentences: Tensor) -> None:
        """Continue the *sentences* (int64) of *other*, after the same copy of its cache."""
        self._set_options(options)
        tokens, other_tokens = (state.cache.tokens.view(-1, self.beam) for state in (self, other))
        copy_selected(self.scores, other.scores, sentences)
        copy_selected(self.ignored, other.ignored, sentences)
        copy_selected(tokens, other_tokens, sentences)
        copy_selected(self.num_finished.fill_(self.beam), other.num_finished, sentences)

    def step(
        self,
        model: Any,
        weights: FusedWeights,
        options: SearchOptions,
        shape: tuple[int, int],
        first: bool,
        static: bool,
    ) -> None:
        """Decode one token and select continuations, as one iteration of ``SequenceGenerator._generate``.

        Args:
            weights: the joined projections of *model*.
            shape: length and source, as in :func:`surface_fusion.decoding.step.decode_step`.
            first: all beams of a sentence are equal, so only the first one is continued.
            static: the shapes of all operations must not depend on values, as in a captured graph.
        """
        t = self.cache.position.clone()
        out = decode_step(model.decoder, weights, self.cache, *shape, options.with_attention)
        if out.attention is not None:
            attention = out.attention.float().view(1, *self.scores.shape, -1)
            self.history.attention[..., : shape[1]].index_copy_(0, t, attention)
        penalties = self.penalties.masked_fill(self.is_eos & (t < self.min_len), -torch.inf)
        penalties.masked_fill_(~self.is_eos & (t >= self.max_len), -torch.inf)
        scores, candidates = self._candidates(model, options, out.features, penalties, first, static)
        beams, tokens = candidates // len(self.is_eos), candidates % len(self.is_eos)
        self._select(t, scores, beams, tokens, tokens.eq(options.eos) & scores.ne(-torch.inf))

    def _candidates(
        self,
        model: Any,
        options: SearchOptions,
        features: Tensor,
        penalties: Tensor,
        first: bool,
        static: bool,
    ) -> tuple[Tensor, Tensor]:
        """The 2 B best continuations of each sentence, S x 2 B: their scores, and beam * V + token.

        Unless *static*, finished sentences are not projected to the vocabulary; theirs are 0.
        """
        scores, unfinished = self.scores, None
        if not static:
            unfinished = (self.num_finished < self.beam).nonzero().flatten()
            features = features.unflatten(0, scores.shape).index_select(0, unfinished).flatten(0, 1)
            scores = scores.index_select(0, unfinished)
        chunk = max(1, MAX_LOGITS // (2 * self.beam * len(penalties)))
        best, log_probs = [], None
        for rows, totals in zip(features.split(chunk * self.beam), scores.split(chunk), strict=True):
            log_probs, *chunk_best = _best_continuations(model, options, rows, penalties, totals, first)
            best.append(chunk_best)
        scores, candidates = (torch.cat(x) for x in zip(*best, strict=True))
        if unfinished is not None:
            # Otherwise the C library returns the memory to the system, and each step faults it in again.
            self._last_log_probs = log_probs
            shape = len(self.num_finished), 2 * self.beam
            scores = scores.new_zeros(shape).index_copy_(0, unfinished, scores)
            candidates = candidates.new_zeros(shape).index_copy_(0, unfinished, candidates)
        return scores, candidates

    def _select(self, t: Tensor, scores: Tensor, beams: Tensor, tokens: Tensor, is_end: Tensor) -> None:
        """Continue the B best candidates that do not end, and finish those among the B best that do.

        Args:
            t: 1, int64: the step.
            scores, beams, tokens: S x 2 B, of each candidate, the best first.
            is_end: S x 2 B, bool: the candidate ends its hypothesis.
        """
        beam, cache = self.beam, self.cache
        finished = is_end[:, :beam] & ~self.ignored
        skipped = torch.cat([finished | self.ignored, is_end[:, beam:]], dim=1)
        rank, active = (skipped * 2 * beam + self.ranks).topk(beam, largest=False)
        next_beams, next_tokens, next_scores = (x.gather(1, active) for x in (beams, tokens, scores))
        records = next_beams, next_tokens, next_scores, finished, beams[:, :beam], scores[:, :beam]
        for stored, new in zip(self.history[: len(records)], records, strict=True):
            stored.index_copy_(0, t, new.unsqueeze(0))
        self.ignored.copy_(rank >= 2 * beam)
        self.num_finished.add_(finished.sum(dim=1))
        self.remaining.copy_((self.num_finished < beam).sum())
        cache.order.copy_((next_beams + cache.rows.view(-1, beam)[:, :1]).flatten())
        cache.tokens.copy_(next_tokens.flatten())
        self.scores.copy_(next_scores)


def _best_continuations(
    model: Any, options: SearchOptions, features: Tensor, penalties: Tensor, scores: Tensor, first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """The 2 B best continuations of each of S sentences.

    Args:
        features: of S x B rows.
        scores: S x B, of the hypotheses so far.

    Returns:
        The scores of all continuations, S x B x V; of the best, S x 2 B; and their beam * V + token.
    """
    logits = model.decoder.output_layer(features)
    if options.temperature != 1:
        logits = logits / options.temperature
    log_probs = model.get_normalized_probs((logits, None), log_probs=True)[:, -1]
    totals = log_probs.nan_to_num_(-torch.inf, torch.inf, -torch.inf).add_(penalties)
    totals = totals.unflatten(0, scores.shape)
    # The choice of topk among ties depends on the input's size: use the same size as fairseq's search.
    among = totals[:, 0].contiguous() if first else totals.add_(scores.unsqueeze(-1)).flatten(1)
    best = among.topk(2 * scores.shape[1])
    return totals, best.values, best.indices


class Search:
    """The search for one batch.

    Args:
        model: a model for whose decoder ``why_not_fast`` gives no reason.
        encoder_out: the encoder's output for S sentences.
        beam: B.
        options: the options of the search.
    """

    def __init__(
        self, model: Any, encoder_out: Mapping[str, list[Tensor]], beam: int, options: SearchOptions
    ) -> None:
        self.model, self.options = model, options
        self.decoding: FastDecoding = model.decoder.fast_decoding
        self.sentences = len(encoder_out["encoder_padding_mask"][0])
        self.active = torch.arange(self.sentences)
        """The batch's index of each sentence in the current cache."""
        self.state: DecodeState = self.decoding.new_search(model.decoder, encoder_out, beam)
        self._parts: list[tuple[int, Tensor, History]] = []
        """The first step, the sentences and the history of each cache used so far."""

    def run(self, bos: int) -> Hypotheses:
        """Search until each sentence has B finished hypotheses or the maximum length is reached."""
        state, steps, first_step = self.state, self.options.max_len + 1, 0
        beams = self._beam_state()
        beams.reset(self.options, self.sentences, bos)
        counter = RemainingCounter(steps, beams.remaining)
        for t in range(steps):
            remaining = counter.known_before(t)
            if remaining == 0:
                break
            if self.decoding.needs_other_cache(state, remaining):
                self._save_history(beams, first_step, t)
                unfinished = (beams.num_finished[: len(self.active)] < state.beam).nonzero().flatten()
                if len(unfinished) == 0:
                    first_step = t
                    break
                self.active, first_step = self.active[unfinished.cpu()], t
                self.decoding.change_cache(self.model.decoder, state, unfinished)
                previous, beams = beams, self._beam_state()
                beams.copy_from(self.options, previous, unfinished)
            self.decoding.search_step(state, beams, self.model, self.options)
            counter.record(t, beams.remaining)
        self._save_history(beams, first_step, state.decoded)
        return trace_back(self._joined_history(), self.options.eos)

    def _beam_state(self) -> BeamState:
        slot = self.state.slot
        if slot.beams is None:
            slot.beams = BeamState(slot.cache, self.model.decoder)
        if self.options.with_attention:
            slot.beams.allocate_attention()
        return slot.beams

    def _save_history(self, beams: BeamState, first_step: int, end: int) -> None:
        """Copy the history of steps *first_step* to *end* to the CPU, since others may reuse the cache."""
        count, source = len(self.active), self.state.source if self.options.with_attention else 0
        history = beams.history._replace(attention=beams.history.attention[..., :source])
        part = History(*(x[first_step:end, :count].to("cpu", copy=True) for x in history))
        self._parts.append((first_step, self.active, part))

    def _joined_history(self) -> History:
        """The history of all sentences and steps; nothing finishes where a sentence was not active."""
        steps = self.state.decoded
        whole = History(*(x.new_zeros(steps, self.sentences, *x.shape[2:]) for x in self._parts[0][2]))
        for first_step, sentences, part in self._parts:
            for target, x in zip(whole, part, strict=True):
                target[first_step : first_step + len(x), sentences] = x
        return whole


class RemainingCounter:
    """The number of unfinished sentences; on a GPU it is read one step late, so that the GPU never waits."""

    def __init__(self, steps: int, like: Tensor) -> None:
        self._remaining = torch.ones(steps, dtype=like.dtype, pin_memory=like.is_cuda)
        self._events: list[torch.cuda.Event] = []

    def record(self, t: int, remaining: Tensor) -> None:
        """Start copying *remaining* (1) to the host after step *t*."""
        self._remaining[t : t + 1].copy_(remaining, non_blocking=True)
        if remaining.is_cuda:
            self._events.append(torch.cuda.Event())
            self._events[-1].record(torch.cuda.current_stream(remaining.device))

    def known_before(self, t: int) -> int | None:
        """The latest number known before step *t*; None if there is none yet."""
        step = t - 2 if self._events else t - 1
        if step < 0:
            return None
        if self._events:
            self._events[step].synchronize()
        return int(self._remaining[step])
