"""Fast incremental decoding: few kernels, and no copies per step.

``SurfaceFusionDecoder.forward`` uses it when fairseq's generator decodes token by token, and
``beam_search.py`` uses it for its own search. ``decode_step.py`` implements the step. On CUDA, shapes are
rounded up so that few occur; the first step of a shape is a warm-up, the second is captured in a CUDA graph,
and later ones replay it. On the CPU shapes are exact. With fairseq's search the output layer runs outside, so
that only active rows are projected.

fairseq's search reorders hypotheses within their sentence and drops finished sentences. This is assumed if
the encoder's output was repeated as fairseq does it; other callers may reorder rows freely, which needs
copies.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor

from surface_fusion.decoding.eligibility import why_not_fast
from surface_fusion.decoding.encoder_out import ReorderedEncoderOut
from surface_fusion.decoding.step import DecodeCache, FusedWeights, StepOut, position_table
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.ops.cuda_graph import capture

logger = logging.getLogger(__name__)

STATE = "fast_decoding"
"""Key of the state among the decoder's incremental states."""

SMALLEST = 32
"""Lengths on CUDA are powers of two from here on."""

CACHES_KEPT = 8


def round_up(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


class Recorded:
    """The captured graph of a step, its results, and references to the tensors that it reads."""

    def __init__(self, graph: torch.cuda.CUDAGraph, out: StepOut | None, positions: Tensor | None) -> None:
        self.graph, self.out, self.positions = graph, out, positions


class Lease:
    """A cache, the steps recorded on it by their shape, and the state that uses it now."""

    def __init__(self, cache: DecodeCache, user: "DecodeState") -> None:
        self.cache = cache
        self.beams: Any = None
        """What ``beam_search.py`` keeps beside the cache."""
        self.steps: dict[tuple[Any, ...], Recorded | None] = {}
        """None: that shape has run once."""
        self.pool: Any = None
        """Memory of the graphs. Theirs alone: torch refuses a pool whose graphs have all gone."""
        self.user: Any = weakref.ref(user)


class DecodeState:
    """Where one batch is: its cache, and the cache's row of each hypothesis (*slots*, int64)."""

    lease: Lease

    def __init__(self, rows: Tensor, beam: int, searched: bool, source: int) -> None:
        self.slots = rows
        self.beam = beam
        self.searched = searched
        """Whether rows stay within their sentence."""
        self.source = source
        """Longest source sentence."""
        self.decoded = 0

    def sentences(self) -> Tensor:
        """The cache's index of each sentence that is left."""
        return self.slots[:: self.beam] // self.beam


class FastDecoding:
    """The caches, captured graphs and joined weights of one decoder, created on demand.

    They are not part of the model: a copied or pickled model starts without them.

    Attributes:
        static: round shapes up, as captured graphs need; by default if the decoder is on CUDA.
        graphs: capture graphs on CUDA; false after the first failure.
    """

    def __init__(self) -> None:
        self.static: bool | None = None
        self.graphs = True
        self._told: set[str] = set()
        self.release()

    def __reduce__(self) -> tuple[type["FastDecoding"], tuple[()]]:
        return FastDecoding, ()

    def release(self) -> None:
        """Free all memory; parameters may change afterwards."""
        self._leases: list[Lease] = []
        self._weights: FusedWeights | None = None
        self._signature: tuple[int, ...] = ()
        self._stream: torch.cuda.Stream | None = None

    def begin(
        self, decoder: Any, tokens: Tensor, encoder_out: Mapping[str, list[Tensor]]
    ) -> DecodeState | None:
        """Return the state for a new batch, or None if the regular modules must decode; logs the reason.

        Args:
            decoder: a :class:`surface_fusion.models.decoder.SurfaceFusionDecoder`.
            tokens: R x 1, the first tokens.
            encoder_out: the encoder's output for R rows.
        """
        if decoder.training or torch.is_grad_enabled() or tokens.shape[1] != 1:
            return None
        reason = why_not_fast(decoder)
        if reason is not None:
            if reason not in self._told:
                self._told.add(reason)
                logger.info(f"decoding by fairseq's modules, not the fast path: {reason}")
            return None
        beam, sentences = None, encoder_out
        if isinstance(encoder_out, ReorderedEncoderOut):
            beam = encoder_out.beam()
            sentences = dict(encoder_out) if beam is None else encoder_out.sentences
        rows = torch.arange(len(tokens), device=tokens.device)
        return self._begin(decoder, sentences, rows, beam)

    def begin_search(self, decoder: Any, encoder_out: Mapping[str, list[Tensor]], beam: int) -> DecodeState:
        """The state of *beam* hypotheses for each sentence of *encoder_out*."""
        sentences = encoder_out["encoder_padding_mask"][0]
        rows = torch.arange(len(sentences) * beam, device=sentences.device)
        return self._begin(decoder, encoder_out, rows, beam)

    def _begin(
        self, decoder: Any, sentences: Mapping[str, list[Tensor]], rows: Tensor, beam: int | None
    ) -> DecodeState:
        source = sentences["encoder_out"][0].shape[0]
        state = DecodeState(rows, beam or 1, beam is not None, source)
        weights = self._current_weights(decoder)
        state.lease = self._lease(decoder, state, len(rows) // state.beam, 1)
        state.lease.cache.read_source(decoder, weights, sentences)
        return state

    def step(self, decoder: Any, state: DecodeState, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Decode one token.

        Args:
            tokens: R x T, of which the last is new.

        Returns:
            Features R x 1 x C (or R x 1 x 2 x C) and, if the last layer is to give it
            (``need_attn``), its attention to the source, R x 1 x S; own memory, not the graph's.
        """
        if tokens.shape != (len(state.slots), state.decoded + 1):
            raise SurfaceFusionError(
                f"incremental decoding got tokens of shape {tuple(tokens.shape)} where "
                f"{(len(state.slots), state.decoded + 1)} was next; decode one token a call, or set sf_plain"
            )
        if self.must_move(state, len(state.slots) // state.beam):
            self.move(decoder, state, state.sentences())
        cache = state.lease.cache
        cache.tokens.index_copy_(0, state.slots, tokens[:, -1])
        weights = self._weights
        assert weights is not None
        key = (*self._next_shape(state), bool(weights.layers[-1].need_attn))
        out = self._run(decoder, state.lease, key, lambda: cache.step(decoder, weights, *key))
        assert out is not None
        features = out.features.index_select(0, state.slots)
        if out.attention is None:
            return features, None
        return features, out.attention.index_select(0, state.slots)[..., : state.source]

    def search_step(self, state: DecodeState, beams: Any, model: Any, rules: Any) -> None:
        """:meth:`surface_fusion.decoding.beam_search.Beams.step` on the state's cache."""
        weights = self._weights
        assert weights is not None
        how = self._next_shape(state), state.decoded == 1, self._is_static(state.slots)
        # The other rules are on the device.
        key = (*how, rules.eos, rules.temperature, rules.with_attention)
        self._run(model.decoder, state.lease, key, lambda: beams.step(model, weights, rules, *how))

    def _next_shape(self, state: DecodeState) -> tuple[int, int]:
        """The target and source positions that the next step looks at."""
        state.decoded += 1
        length, source = state.decoded, state.source
        if self._is_static(state.slots):
            length, source = max(SMALLEST, round_up(length)), max(SMALLEST, round_up(source))
        return length, source

    def must_move(self, state: DecodeState, sentences: int | None) -> bool:
        """Whether the cache is full, or too large for the remaining sentences (None: unknown)."""
        cache = state.lease.cache
        most = (0.25 if self._is_static(state.slots) else 0.75) * cache.sentences
        too_large = sentences is not None and cache.sentences > 1 and sentences <= most
        return state.decoded == cache.length or too_large

    def reorder(self, decoder: Any, state: DecodeState, new_order: Tensor) -> None:
        """Reorder: row i becomes row ``new_order[i]``; sentences that are not in it are finished."""
        if not state.searched:
            self.move(decoder, state, state.slots.index_select(0, new_order))
            return
        if len(new_order) > len(state.slots) or len(new_order) % state.beam:
            raise SurfaceFusionError(
                f"beam search asked for {len(new_order)} hypotheses after {len(state.slots)} at beam "
                f"{state.beam}; only whole sentences can end, set sf_plain for other searches"
            )
        order = state.lease.cache.order
        continued = order.index_select(0, state.slots.index_select(0, new_order))
        if len(new_order) < len(state.slots):
            left = new_order[:: state.beam] // state.beam
            state.slots = state.slots.view(-1, state.beam).index_select(0, left).flatten()
        order.index_copy_(0, state.slots, continued)

    def _is_static(self, like: Tensor) -> bool:
        return like.is_cuda if self.static is None else self.static

    def _current_weights(self, decoder: Any) -> FusedWeights:
        """The joined weights with today's values; graphs on parameters that have moved are dropped."""
        signature = tuple(p.data_ptr() for p in decoder.parameters())
        if self._weights is None or signature != self._signature:
            self.release()
            self._weights, self._signature = FusedWeights(decoder), signature
        self._weights.refresh()
        return self._weights

    def _lease(self, decoder: Any, state: DecodeState, sentences: int, length: int) -> Lease:
        """A cache for *state* with room for *length* target positions, in its first state."""
        source = state.source
        static = self._is_static(state.slots)
        length = max(SMALLEST, round_up(length))
        if decoder.embed_positions is not None:
            missing = decoder.padding_idx + 1 + length > len(position_table(decoder))
            if missing and isinstance(decoder.embed_positions, SinusoidalPositionalEmbedding):
                decoder.embed_positions(state.slots.new_zeros(1, length))  # lengthens its table
        if not static:
            return Lease(DecodeCache(decoder, sentences, state.beam, length, source), state)
        sentences, source = round_up(sentences), max(SMALLEST, round_up(source))
        lease = None
        for free in [x for x in self._leases if x.user() is None]:
            cache = free.cache
            if (cache.sentences, cache.beam) == (sentences, state.beam):
                self._leases.remove(free)
                if cache.length >= length and cache.source >= source:
                    lease = free
                length, source = max(length, cache.length), max(source, cache.source)
        if lease is None:
            lease = Lease(DecodeCache(decoder, sentences, state.beam, length, source), state)
        for free in [x for x in self._leases if x.user() is None][: -CACHES_KEPT + 1]:
            self._leases.remove(free)
        self._leases.append(lease)  # the most recently used is the last
        lease.cache.clear()
        lease.user = weakref.ref(state)
        return lease

    def move(self, decoder: Any, state: DecodeState, sentences: Tensor) -> None:
        """Go on with these sentences of the cache alone, in a cache that has room for the next token."""
        old = state.lease
        state.lease = self._lease(decoder, state, len(sentences), state.decoded + 1)
        cache = state.lease.cache
        cache.take(old.cache, sentences)
        state.slots = cache.rows[: len(sentences) * state.beam]
        old.user = _nobody

    def _run(
        self, decoder: Any, lease: Lease, key: tuple[Any, ...], work: Callable[[], StepOut | None]
    ) -> StepOut | None:
        """*work*, by a graph if one of the same *key* has been recorded on the lease, or can be."""
        if not (self.graphs and lease.cache.tokens.is_cuda):
            return work()
        if key not in lease.steps:
            lease.steps[key] = None
            return work()
        recorded = lease.steps[key]
        if recorded is None:
            try:
                recorded = lease.steps[key] = self._record(decoder, lease, work)
            except RuntimeError as error:
                self.graphs = False
                logger.warning(f"decoding without CUDA graphs, since recording one failed: {error}")
                return work()
        recorded.graph.replay()
        return recorded.out

    def _record(self, decoder: Any, lease: Lease, work: Callable[[], StepOut | None]) -> Recorded:
        """*work* as a graph; nothing is computed."""
        stream = self._stream = self._stream or torch.cuda.Stream(lease.cache.tokens.device)
        lease.pool = lease.pool or torch.cuda.graph_pool_handle()
        graph, out = capture(work, stream, lease.pool)
        positions = None if decoder.embed_positions is None else position_table(decoder)
        return Recorded(graph, out, positions)


def _nobody() -> None:
    """The user of a cache that is free."""
