"""Caches, captured graphs and joined weights of a decoder (:class:`FastDecoding`).

``SurfaceFusionDecoder.forward`` uses them when fairseq's generator decodes token by token, and
``beam_search.py`` for its own search. ``docs/fast_path.md`` describes the graphs; on the CPU, only the
capacity in target positions is rounded. With fairseq's search the output layer runs outside of the graph, to
project active rows only.

fairseq's search reorders hypotheses within their sentence and drops finished sentences. This is assumed if
the encoder's output was repeated as fairseq does it; other callers may reorder rows freely, which copies the
cache.
"""

import logging
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from fairseq.modules import SinusoidalPositionalEmbedding
from torch import Tensor

from surface_fusion.decoding.cache import DecodeCache, FusedWeights
from surface_fusion.decoding.eligibility import why_not_fast
from surface_fusion.decoding.encoder_out import ReorderedEncoderOut
from surface_fusion.decoding.step import StepOut, decode_step, position_table
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.ops.cuda_graph import capture

logger = logging.getLogger(__name__)

STATE = "fast_decoding"
"""Key of the state among the decoder's incremental states."""

MIN_LENGTH = 32
"""Target lengths of caches, and on CUDA source lengths, are powers of two of at least this."""

MAX_CACHES = 8
"""Unused cache slots beyond this number are freed."""


def round_up(n: int) -> int:
    """The next power of two."""
    return 1 << (n - 1).bit_length()


class StepGraph:
    """The captured graph of a step, its results, and references to the tensors that it reads."""

    def __init__(self, graph: torch.cuda.CUDAGraph, out: StepOut | None, positions: Tensor | None) -> None:
        self.graph, self.out, self.positions = graph, out, positions


class CacheSlot:
    """A cache, the steps captured on it by their shape, and the batch that uses it."""

    def __init__(self, cache: DecodeCache, owner: "DecodeState") -> None:
        self.cache = cache
        self.beams: Any = None
        """The ``BeamState`` of this cache, if ``beam_search.py`` has used it."""
        self.steps: dict[tuple[Any, ...], StepGraph | None] = {}
        """None after the warm-up of a shape, before its capture."""
        self.pool: Any = None
        """Memory pool of these graphs only: torch refuses a pool whose graphs have all been freed."""
        self.owner: Any = weakref.ref(owner)


class DecodeState:
    """The state of one batch: its cache slot, and the cache's row of each hypothesis (*rows*, int64)."""

    slot: CacheSlot

    def __init__(self, rows: Tensor, beam: int, within_sentence: bool, source: int) -> None:
        self.rows = rows
        self.beam = beam
        self.within_sentence = within_sentence
        """Whether hypotheses are only reordered within their sentence."""
        self.source = source
        """Length of the longest source sentence."""
        self.decoded = 0
        """Number of decoded tokens."""

    def sentences(self) -> Tensor:
        """The cache's index of each unfinished sentence."""
        return self.rows[:: self.beam] // self.beam


class FastDecoding:
    """The caches, captured graphs and joined weights of one decoder, created on demand.

    They are not part of the model: a copied or pickled model starts without them.

    Attributes:
        static: whether to round shapes up, as captured graphs need; None: if the decoder is on CUDA.
        graphs: whether to capture graphs on CUDA; false after the first failure.
    """

    def __init__(self) -> None:
        self.static: bool | None = None
        self.graphs = True
        self._logged_reasons: set[str] = set()
        self.release()

    def __reduce__(self) -> tuple[type["FastDecoding"], tuple[()]]:
        return FastDecoding, ()

    def release(self) -> None:
        """Free all memory."""
        self._slots: list[CacheSlot] = []
        self._weights: Any = None  # FusedWeights, once a batch has started
        self._signature: tuple[int, ...] = ()
        self._stream: torch.cuda.Stream | None = None

    def new_state(
        self, decoder: Any, tokens: Tensor, encoder_out: Mapping[str, list[Tensor]]
    ) -> DecodeState | None:
        """Return the state of a new batch, or None if fairseq's modules must decode; logs each reason once.

        Args:
            decoder: a :class:`surface_fusion.models.decoder.SurfaceFusionDecoder`.
            tokens: R x 1, the first tokens.
            encoder_out: the encoder's output for R rows.
        """
        if decoder.training or torch.is_grad_enabled() or tokens.shape[1] != 1:
            return None
        reason = why_not_fast(decoder)
        if reason is not None:
            if reason not in self._logged_reasons:
                self._logged_reasons.add(reason)
                logger.info(f"decoding by fairseq's modules, not the fast path: {reason}")
            return None
        beam, sentences = None, encoder_out
        if isinstance(encoder_out, ReorderedEncoderOut):
            beam = encoder_out.beam()
            sentences = dict(encoder_out) if beam is None else encoder_out.sentences
        rows = torch.arange(len(tokens), device=tokens.device)
        return self._new_state(decoder, sentences, rows, beam)

    def new_search(self, decoder: Any, encoder_out: Mapping[str, list[Tensor]], beam: int) -> DecodeState:
        """Return the state of a search with *beam* hypotheses for each sentence of *encoder_out*."""
        sentences = encoder_out["encoder_padding_mask"][0]
        rows = torch.arange(len(sentences) * beam, device=sentences.device)
        return self._new_state(decoder, encoder_out, rows, beam)

    def _new_state(
        self, decoder: Any, sentences: Mapping[str, list[Tensor]], rows: Tensor, beam: int | None
    ) -> DecodeState:
        source = sentences["encoder_out"][0].shape[0]
        state = DecodeState(rows, beam or 1, beam is not None, source)
        weights = self._current_weights(decoder)
        state.slot = self._acquire_slot(decoder, state, len(rows) // state.beam, 1)
        state.slot.cache.set_encoder_out(decoder, weights, sentences)
        return state

    def step(self, decoder: Any, state: DecodeState, tokens: Tensor) -> tuple[Tensor, Tensor | None]:
        """Decode one token.

        Args:
            tokens: R x T; the last is new.

        Returns:
            Features R x 1 x C (or R x 1 x 2 x C) and, with the last layer's ``need_attn``, its attention to
            the source, R x 1 x S; copies of the graph's outputs.
        """
        expected = len(state.rows), state.decoded + 1
        if tokens.shape != expected:
            raise SurfaceFusionError(
                f"incremental decoding got tokens of shape {tuple(tokens.shape)} where {expected} was next; "
                "decode one token a call, or set sf_plain"
            )
        if self.needs_other_cache(state, len(state.rows) // state.beam):
            self.change_cache(decoder, state, state.sentences())
        cache = state.slot.cache
        cache.tokens.index_copy_(0, state.rows, tokens[:, -1])
        key = (*self._next_shape(state), bool(self._weights.layers[-1].need_attn))
        out = self._run(decoder, state.slot, key, lambda: decode_step(decoder, self._weights, cache, *key))
        features = out.features.index_select(0, state.rows)
        if out.attention is None:
            return features, None
        return features, out.attention.index_select(0, state.rows)[..., : state.source]

    def search_step(self, state: DecodeState, beams: Any, model: Any, options: Any) -> None:
        """Run :meth:`surface_fusion.decoding.beam_search.BeamState.step` on the state's cache."""
        args = self._next_shape(state), state.decoded == 1, self._is_static(state.rows)
        # A graph reads the other options from the device.
        key = (*args, options.eos, options.temperature, options.with_attention)
        self._run(model.decoder, state.slot, key, lambda: beams.step(model, self._weights, options, *args))

    def _next_shape(self, state: DecodeState) -> tuple[int, int]:
        """Count one more token; return the number of target and source positions that its step attends to."""
        state.decoded += 1
        length, source = state.decoded, state.source
        if self._is_static(state.rows):
            length, source = max(MIN_LENGTH, round_up(length)), max(MIN_LENGTH, round_up(source))
        return length, source

    def needs_other_cache(self, state: DecodeState, sentences: int | None) -> bool:
        """Whether the cache is full, or too large for the remaining *sentences* (None: unknown)."""
        cache = state.slot.cache
        limit = (0.25 if self._is_static(state.rows) else 0.75) * cache.sentences
        too_large = sentences is not None and cache.sentences > 1 and sentences <= limit
        return state.decoded == cache.length or too_large

    def reorder(self, decoder: Any, state: DecodeState, new_order: Tensor) -> None:
        """Let hypothesis i continue hypothesis ``new_order[i]``; sentences without an index are finished."""
        if not state.within_sentence:
            self.change_cache(decoder, state, state.rows.index_select(0, new_order))
            return
        if len(new_order) > len(state.rows) or len(new_order) % state.beam:
            raise SurfaceFusionError(
                f"beam search asked for {len(new_order)} hypotheses after {len(state.rows)} at beam "
                f"{state.beam}; only whole sentences can end, set sf_plain for other searches"
            )
        order = state.slot.cache.order
        continued = order.index_select(0, state.rows.index_select(0, new_order))
        if len(new_order) < len(state.rows):
            unfinished = new_order[:: state.beam] // state.beam
            state.rows = state.rows.view(-1, state.beam).index_select(0, unfinished).flatten()
        order.index_copy_(0, state.rows, continued)

    def _is_static(self, like: Tensor) -> bool:
        return like.is_cuda if self.static is None else self.static

    def _current_weights(self, decoder: Any) -> FusedWeights:
        """The joined weights, up to date; frees all graphs if a parameter's memory has changed."""
        signature = tuple(p.data_ptr() for p in decoder.parameters())
        if self._weights is None or signature != self._signature:
            self.release()
            self._weights, self._signature = FusedWeights(decoder), signature
        self._weights.refresh()
        return self._weights

    def _acquire_slot(self, decoder: Any, state: DecodeState, sentences: int, length: int) -> CacheSlot:
        """Reset an unused cache, or create one, for *sentences* and *length* target positions."""
        source, length = state.source, max(MIN_LENGTH, round_up(length))
        if decoder.embed_positions is not None:
            missing = decoder.padding_idx + 1 + length > len(position_table(decoder))
            if missing and isinstance(decoder.embed_positions, SinusoidalPositionalEmbedding):
                decoder.embed_positions(state.rows.new_zeros(1, length))  # extends its table
        if not self._is_static(state.rows):
            return CacheSlot(DecodeCache(decoder, sentences, state.beam, length, source), state)
        sentences, source = round_up(sentences), max(MIN_LENGTH, round_up(source))
        slot = None
        for unused in self._unused_slots():
            cache = unused.cache
            if (cache.sentences, cache.beam) == (sentences, state.beam):
                self._slots.remove(unused)
                if cache.length >= length and cache.source >= source:
                    slot = unused
                length, source = max(length, cache.length), max(source, cache.source)
        if slot is None:
            slot = CacheSlot(DecodeCache(decoder, sentences, state.beam, length, source), state)
        for unused in self._unused_slots()[: -MAX_CACHES + 1]:
            self._slots.remove(unused)
        self._slots.append(slot)  # the most recently used is the last
        slot.cache.reset()
        slot.owner = weakref.ref(state)
        return slot

    def _unused_slots(self) -> list[CacheSlot]:
        return [slot for slot in self._slots if slot.owner() is None]

    def change_cache(self, decoder: Any, state: DecodeState, sentences: Tensor) -> None:
        """Copy *sentences* (int64) to another cache, which has room for the next token."""
        old = state.slot
        state.slot = self._acquire_slot(decoder, state, len(sentences), state.decoded + 1)
        state.slot.cache.copy_from(old.cache, sentences)
        state.rows = state.slot.cache.rows[: len(sentences) * state.beam]
        old.owner = lambda: None

    def _run(self, decoder: Any, slot: CacheSlot, key: tuple[Any, ...], work: Callable[[], Any]) -> Any:
        """Run *work*: directly the first time for *key* (warm-up), later by replaying its captured graph."""
        if not (self.graphs and slot.cache.tokens.is_cuda):
            return work()
        if key not in slot.steps:
            slot.steps[key] = None
            return work()
        captured = slot.steps[key]
        if captured is None:
            try:
                captured = slot.steps[key] = self._capture(decoder, slot, work)
            except RuntimeError as error:
                self.graphs = False
                logger.warning(f"decoding without CUDA graphs, since capturing one failed: {error}")
                return work()
        captured.graph.replay()
        return captured.out

    def _capture(self, decoder: Any, slot: CacheSlot, work: Callable[[], Any]) -> StepGraph:
        """Capture *work* in a graph without running it."""
        stream = self._stream = self._stream or torch.cuda.Stream(slot.cache.tokens.device)
        slot.pool = slot.pool or torch.cuda.graph_pool_handle()
        graph, out = capture(work, stream, slot.pool)
        positions = None if decoder.embed_positions is None else position_table(decoder)
        return StepGraph(graph, out, positions)
