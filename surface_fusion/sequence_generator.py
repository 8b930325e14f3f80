"""fairseq's sequence generators, with beam search on the model's device for models of this package.

Plain beam search with a single model runs in ``decoding/beam_search.py`` and returns the same hypotheses.
Whatever else is requested (sampling, constraints, prefixes, ensembles, ...) runs in fairseq's loop.

:mod:`surface_fusion.hooks` lets ``FairseqTask.build_generator`` choose these classes. Tasks that override it
without calling ``super()``, such as ``translation_from_pretrained_bart``, and callers that construct
fairseq's ``SequenceGenerator`` themselves keep fairseq's search.
"""

from typing import Any

import torch
from fairseq.search import BeamSearch
from fairseq.sequence_generator import (
    EnsembleModel,
    EnsembleModelWithAlignment,
    SequenceGenerator,
    SequenceGeneratorWithAlignment,
)
from torch import Tensor

from surface_fusion.decoding.beam_search import Search, SearchOptions
from surface_fusion.decoding.eligibility import why_not_fast
from surface_fusion.decoding.hypotheses import Hypotheses
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.decoder import SurfaceFusionDecoder
from surface_fusion.modules.stacks import layers_of

Translations = list[list[dict[str, Tensor]]]


class FastSequenceGenerator(SequenceGenerator):
    """``SequenceGenerator`` whose plain beam search runs on the device; it returns hypotheses on the CPU."""

    def _generate(
        self,
        sample: dict[str, Any],
        prefix_tokens: Tensor | None = None,
        constraints: Tensor | None = None,
        bos_token: int | None = None,
    ) -> Translations:
        """Translate a batch.

        Raises:
            SurfaceFusionError: a sentence has no translation.
        """
        net_input = sample["net_input"]
        supported = prefix_tokens is None and constraints is None and "src_tokens" in net_input
        supported &= (bos_token is None or isinstance(bos_token, int)) and not torch.is_grad_enabled()
        if not supported or not self._is_plain_beam_search():
            return super()._generate(sample, prefix_tokens, constraints, bos_token)
        source, model = net_input["src_tokens"].shape[1], self.model.single_model
        options = SearchOptions(
            eos=self.eos,
            suppressed=(self.pad, *self._suppressed()),
            unk=self.unk,
            unk_penalty=self.unk_penalty,
            temperature=self.temperature,
            min_len=self.min_len,
            max_len=min(int(self.max_len_a * source + self.max_len_b), self.max_len - 1),
            with_attention=bool(layers_of(model.decoder)[-1].need_attn),
        )
        if options.max_len < max(options.min_len, 0):
            return super()._generate(sample, prefix_tokens, constraints, bos_token)  # raises the error
        encoder_out = model.encoder.forward_torchscript(net_input)
        search = Search(model, encoder_out, self.beam_size, options)
        hypotheses = search.run(self.eos if bos_token is None else bos_token)
        return self._to_fairseq(hypotheses, search.sentences)

    def _is_plain_beam_search(self) -> bool:
        """Whether only plain beam search is requested, with a single model that supports fast decoding."""
        model = self.model
        classes = FastSequenceGenerator, FastSequenceGeneratorWithAlignment
        unchanged = (
            _is_exactly(self, classes, "finalize_hypos", "is_finished")
            and _is_exactly(self.search, (BeamSearch,), "step")
            and _is_exactly(model, (EnsembleModel, EnsembleModelWithAlignment), "forward_decoder")
            and model.models_size == 1
            and _is_exactly(getattr(model.single_model, "decoder", None), (SurfaceFusionDecoder,), "forward")
        )
        if not unchanged or self.match_source_len or self.repeat_ngram_blocker or self.lm_model:
            return False
        decoder = model.single_model.decoder
        # With fewer tokens than candidates, fairseq's search selects suppressed tokens as well.
        enough_tokens = 2 * self.beam_size + 3 + len(self._suppressed()) <= self.vocab_size
        return enough_tokens and not decoder.training and why_not_fast(decoder) is None

    def _suppressed(self) -> list[int]:
        tokens = self.token_indices_to_suppress
        return [] if tokens is None else [int(token) for token in tokens]

    def _to_fairseq(self, hypotheses: Hypotheses, sentences: int) -> Translations:
        """Convert to fairseq's format; scores may differ in the last bit, since the CPU normalises them."""
        lengths = hypotheses.length.tolist()
        scores = hypotheses.scores.gather(1, hypotheses.length.unsqueeze(1) - 1).squeeze(1)
        if self.normalize_scores:
            scores = scores / scores.new_tensor([length**self.len_penalty for length in lengths])
        positional_scores = hypotheses.scores.clone()
        positional_scores[:, 1:] -= hypotheses.scores[:, :-1]
        mask = torch.arange(hypotheses.tokens.shape[1]) < hypotheses.length.unsqueeze(1)
        attentions = [x[:n].t() for x, n in zip(hypotheses.attention, lengths, strict=True)]
        if hypotheses.attention.shape[2] == 0:
            attentions = [torch.empty(0) for _ in lengths]
        columns = {
            "tokens": hypotheses.tokens[mask].split(lengths),
            "score": scores.unbind(),
            "attention": attentions,
            "alignment": [torch.empty(0) for _ in lengths],
            "positional_scores": positional_scores[mask].split(lengths),
        }
        results: list[list[tuple[float, dict[str, Tensor]]]] = [[] for _ in range(sentences)]
        values = zip(*columns.values(), strict=True)
        for sentence, score, row in zip(hypotheses.sentence.tolist(), scores.tolist(), values, strict=True):
            results[sentence].append((score, dict(zip(columns, row, strict=True))))
        if [] in results:
            raise SurfaceFusionError(
                f"sentence {results.index([])} of the batch has no translation: no hypothesis ends with a "
                "finite score; check that </s> is not suppressed and that the training did not diverge"
            )
        return [[h for _, h in sorted(result, key=lambda pair: -pair[0])] for result in results]


class FastSequenceGeneratorWithAlignment(SequenceGeneratorWithAlignment, FastSequenceGenerator):
    """``SequenceGeneratorWithAlignment`` (``--print-alignment``) with the search of the class above."""

    def _is_plain_beam_search(self) -> bool:
        # Full-context alignment reads the hypotheses a second time, on the model's device.
        second_pass = getattr(self.model.single_model, "full_context_alignment", False)
        return not second_pass and super()._is_plain_beam_search()


def _is_exactly(instance: Any, classes: tuple[type, ...], *methods: str) -> bool:
    """Whether the type of *instance* is one of *classes* and the instance overrides none of *methods*."""
    return type(instance) in classes and not any(method in vars(instance) for method in methods)


def supports_fast_search(model: Any) -> bool:
    """Whether *model* is a SurfaceFusion model whose decoder supports fast decoding."""
    decoder = getattr(model, "decoder", None)
    return type(decoder) is SurfaceFusionDecoder and why_not_fast(decoder) is None
