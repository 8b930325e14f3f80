"""Run beam search on the GPU where possible, with the same hypotheses as fairseq's search.

fairseq's loop takes more time on the host than a fast step takes on the GPU: of 4.1 ms per step for 128
sentences with a beam of 4 (H200), the GPU was busy for 1.3 ms. If only plain beam search is requested,
``decoding/beam_search.py`` runs it on the GPU. Otherwise fairseq's search runs.
"""

from collections.abc import Callable
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

from surface_fusion.decoding.beam_search import Rules, Search
from surface_fusion.decoding.eligibility import why_not_fast
from surface_fusion.decoding.hypotheses import Hypotheses
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.decoder import SurfaceFusionDecoder
from surface_fusion.modules.stacks import layers_of

GENERATORS = SequenceGenerator, SequenceGeneratorWithAlignment
ENSEMBLES = EnsembleModel, EnsembleModelWithAlignment
Translations = list[list[dict[str, Tensor]]]


def generate(
    original: Callable[..., Translations],
    generator: Any,
    sample: dict[str, Any],
    prefix_tokens: Tensor | None = None,
    constraints: Tensor | None = None,
    bos_token: int | None = None,
) -> Translations:
    """fairseq's ``SequenceGenerator._generate``; results of the fast search are on the CPU.

    Raises:
        SurfaceFusionError: a sentence has no translation.
    """
    net_input = sample["net_input"]
    unusual = prefix_tokens is not None or constraints is not None or "src_tokens" not in net_input
    unusual |= not (bos_token is None or isinstance(bos_token, int)) or torch.is_grad_enabled()
    if unusual or not _is_plain(generator):
        return original(generator, sample, prefix_tokens, constraints, bos_token)
    source, model = net_input["src_tokens"].shape[1], generator.model.single_model
    rules = Rules(
        eos=generator.eos,
        never=(generator.pad, *_suppressed(generator)),
        unk=generator.unk,
        unk_penalty=generator.unk_penalty,
        temperature=generator.temperature,
        min_len=generator.min_len,
        max_len=min(int(generator.max_len_a * source + generator.max_len_b), generator.max_len - 1),
        with_attention=bool(layers_of(model.decoder)[-1].need_attn),
    )
    if rules.max_len < max(rules.min_len, 0):
        return original(generator, sample, prefix_tokens, constraints, bos_token)  # raises the error
    encoder_out = model.encoder.forward_torchscript(net_input)
    search = Search(model, encoder_out, generator.beam_size, rules)
    found = search.run(generator.eos if bos_token is None else bos_token)
    return _as_fairseqs(found, search.sentences, generator)


def _is_plain(generator: Any) -> bool:
    """Whether *generator* is fairseq's plain beam search with a single model that decodes fast."""
    model = generator.model
    ours = (
        _is_just(generator, GENERATORS, "finalize_hypos", "is_finished")
        and _is_just(generator.search, (BeamSearch,), "step")
        and _is_just(model, ENSEMBLES, "forward_decoder")
        and model.models_size == 1
        and _is_just(getattr(model.single_model, "decoder", None), (SurfaceFusionDecoder,), "forward")
    )
    if not ours or generator.match_source_len or generator.repeat_ngram_blocker or generator.lm_model:
        return False
    if type(generator) is SequenceGeneratorWithAlignment and _reads_again(model.single_model):
        return False
    decoder = model.single_model.decoder
    barred = 3 + len(_suppressed(generator))
    few = 2 * generator.beam_size + barred > generator.vocab_size  # the search would select suppressed tokens
    return not (few or decoder.training or why_not_fast(decoder) is not None)


def _reads_again(model: Any) -> bool:
    """Whether alignments need a second pass over the finished translation, on the GPU."""
    return bool(getattr(model, "full_context_alignment", False))


def _is_just(thing: Any, kinds: tuple[type, ...], *methods: str) -> bool:
    """Whether the type of *thing* is exactly one of *kinds* and the instance overrides none of *methods*."""
    return type(thing) in kinds and not any(method in vars(thing) for method in methods)


def _suppressed(generator: Any) -> list[int]:
    tokens = generator.token_indices_to_suppress
    return [] if tokens is None else [int(token) for token in tokens]


def _as_fairseqs(found: Hypotheses, sentences: int, generator: Any) -> Translations:
    """Convert to the format of fairseq's search; scores may differ in the last bit (division on the CPU)."""
    lengths = found.length.tolist()
    scores = found.totals.gather(1, found.length.unsqueeze(1) - 1).squeeze(1)
    if generator.normalize_scores:
        scores = scores / scores.new_tensor([length**generator.len_penalty for length in lengths])
    gains = found.totals.clone()
    gains[:, 1:] -= found.totals[:, :-1]
    within = torch.arange(found.tokens.shape[1]) < found.length.unsqueeze(1)
    columns = found.tokens[within].split(lengths), scores.unbind(), gains[within].split(lengths)
    source = found.attention.shape[2]
    read = [
        x[:length].t() if source else torch.empty(0)
        for x, length in zip(found.attention, lengths, strict=True)
    ]
    ranked: list[list[tuple[float, dict[str, Tensor]]]] = [[] for _ in range(sentences)]
    for sentence, value, tokens, score, gain, attention in zip(
        found.sentence.tolist(), scores.tolist(), *columns, read, strict=True
    ):
        hypothesis = {
            "tokens": tokens,
            "score": score,
            "attention": attention,
            "alignment": torch.empty(0),
            "positional_scores": gain,
        }
        ranked[sentence].append((value, hypothesis))
    empty = [i for i, several in enumerate(ranked) if not several]
    if empty:
        raise SurfaceFusionError(
            f"sentence {empty[0]} of the batch has no translation: no hypothesis ends with a finite score; "
            "is the end suppressed, or does the model give no numbers (then look at its training's log)?"
        )
    for several in ranked:
        several.sort(key=lambda pair: -pair[0])
    return [[hypothesis for _, hypothesis in several] for several in ranked]
