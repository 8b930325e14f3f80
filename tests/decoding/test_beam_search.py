"""The beam search on the device finds what fairseq's loop finds."""

from typing import Any

import pytest
import torch

from surface_fusion.decoding import beam_search
from surface_fusion.decoding.beam_search import RemainingCounter
from tests.helpers.beam_search import (
    HARD,
    assert_same_translations,
    fairseq_translations,
    generator_of,
    model_that_ends,
    record_searches,
    translations,
)
from tests.helpers.tiny import VOCAB

MODELS = {
    "hard": HARD,
    "vanilla": (),
    "soft": ("--surfacefusion", "att", "--sf-mode", "soft"),
    "learned gate": ("--surfacefusion", "mean", "--sf-gate", "0"),
}
OPTIONS: dict[str, dict[str, Any]] = {
    "": {},
    "one hypothesis": {"beam_size": 1},
    "length": {"len_penalty": 2.0, "min_len": 2, "max_len_a": 1.2, "max_len_b": 3},
    "unnormalised": {"normalize_scores": False, "temperature": 0.7},
    "words": {"unk_penalty": -2.0, "tokens_to_suppress": ("w5", "w9"), "beam_size": 5},
    "nothing but the end": {"max_len_b": 0, "min_len": 0},
    "long": {"max_len_b": 70, "beam_size": 2},
    "greedy and short": {"beam_size": 1, "max_len_b": 1},
}
STATIC = pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The fast searches that ran."""
    return record_searches(monkeypatch)


@STATIC
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("flags", MODELS.values(), ids=list(MODELS))
def test_translations_equal_those_of_fairseqs_loop(
    flags: tuple[str, ...], options: dict[str, Any], static: bool, searches: list[Any]
) -> None:
    model = model_that_ends(*flags)
    model.decoder.fast_decoding.static = static
    generator = generator_of(model, **options)
    for seed in range(2):  # the second search finds the state of the first
        expected = fairseq_translations(generator, seed)
        assert_same_translations(translations(generator, seed), expected)
    assert len(searches) == 2


@STATIC
def test_sentences_that_end_at_different_times(static: bool, searches: list[Any]) -> None:
    """The cache is left for smaller ones, and for longer ones."""
    model = model_that_ends(*HARD, seed=3, often=3)
    model.decoder.fast_decoding.static = static
    generator = generator_of(model, max_len_b=75)
    found = translations(generator, 5, sentences=17)
    assert_same_translations(found, fairseq_translations(generator, 5, sentences=17))
    caches = [(since, len(sentences)) for since, sentences, _ in searches[0]._parts]
    assert len(caches) > 3 and caches[0][1] == 17 and caches[-1][1] == 6
    assert len({len(hypothesis["tokens"]) for several in found for hypothesis in several}) == 5


def test_logits_are_computed_in_parts_when_they_exceed_the_limit(
    searches: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """No more logits at a time than fit: here those of two sentences, and of one at the end."""
    monkeypatch.setattr(beam_search, "MAX_LOGITS", 2 * 3 * 2 * VOCAB + 1)
    asked: list[int] = []
    model = model_that_ends(*HARD)
    project = model.decoder.output_layer
    monkeypatch.setattr(model.decoder, "output_layer", lambda x: asked.append(len(x)) or project(x))
    generator = generator_of(model)
    found = translations(generator, 1, sentences=5)
    assert asked[:3] == [6, 6, 3] and len(searches) == 1
    assert_same_translations(found, fairseq_translations(generator, 1, sentences=5))


@STATIC
@pytest.mark.parametrize("beam", [2, 4])
@pytest.mark.slow
def test_ties_are_broken_as_in_fairseq(static: bool, beam: int, searches: list[Any]) -> None:
    """topk prefers one of equals by the size of the whole, so it has to be fairseq's."""
    model = model_that_ends()
    with torch.no_grad():
        model.decoder.output_projection.weight[30:60] = model.decoder.output_projection.weight[10:40].clone()
    model.decoder.fast_decoding.static = static
    generator = generator_of(model, beam_size=beam)
    for seed in range(12):
        assert_same_translations(translations(generator, seed), fairseq_translations(generator, seed))
    assert len(searches) == 12


@pytest.mark.parametrize("with_attention", [False, True], ids=["", "with attention"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("flags", MODELS.values(), ids=list(MODELS))
def test_half_and_double_precision_equal_fairseqs_loop(
    flags: tuple[str, ...], dtype: torch.dtype, with_attention: bool, searches: list[Any]
) -> None:
    model = model_that_ends(*flags).to(dtype)
    model.decoder.layers[-1].need_attn = with_attention
    generator = generator_of(model)
    found, expected = translations(generator, 1), fairseq_translations(generator, 1)
    assert_same_translations(found, expected)
    assert searches and found[0][0]["score"].dtype == expected[0][0]["score"].dtype


@pytest.mark.slow
def test_attention_weights_equal_those_of_fairseqs_loop(searches: list[Any]) -> None:
    """As validation with ``--eval-bleu`` asks for it; caches are left, and used again without and with it."""
    for static in (False, True):
        model = model_that_ends(*HARD, seed=3, often=3)
        model.decoder.fast_decoding.static = static
        generator = generator_of(model, max_len_b=75)
        for wanted in (False, True, False, True):
            model.decoder.layers[-1].need_attn = wanted
            for seed, sentences in ((5, 17), (2, 6)):
                found = translations(generator, seed, sentences)
                assert_same_translations(found, fairseq_translations(generator, seed, sentences))
                source = 2 + max((seed + 3 * i) % 7 for i in range(sentences))
                shape = (source, len(found[0][0]["tokens"])) if wanted else (0,)
                assert found[0][0]["attention"].shape == shape
    assert len(searches) == 16


def test_a_cache_made_in_inference_mode_is_reused_outside(searches: list[Any]) -> None:
    model = model_that_ends(*HARD)
    model.decoder.fast_decoding.static = True
    model.decoder.layers[-1].need_attn = True
    generator = generator_of(model)
    with torch.inference_mode():
        translations(generator, 1)
    cache = searches.pop().state.slot.cache
    assert_same_translations(translations(generator, 1), fairseq_translations(generator, 1))
    assert searches.pop().state.slot.cache is cache


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("flags", MODELS.values(), ids=list(MODELS))
def test_captured_graphs_give_fairseqs_translations_on_a_gpu(
    flags: tuple[str, ...], options: dict[str, Any]
) -> None:
    """Graphs are captured and replayed, on caches that other batches have used."""
    model = model_that_ends(*flags).cuda()
    generator = generator_of(model, **options)
    for seed, sentences in enumerate((17, 6, 17, 16, 1, 17, 6)):
        model.decoder.layers[-1].need_attn = seed in (2, 3, 5)
        found = translations(generator, seed, sentences)
        assert not found[0][0]["tokens"].is_cuda
        assert_same_translations(found, fairseq_translations(generator, seed, sentences))
    assert model.decoder.fast_decoding.graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_number_of_remaining_sentences_is_read_one_step_late_on_a_gpu() -> None:
    remaining = torch.tensor([3], device="cuda")
    counter = RemainingCounter(4, remaining)
    for t, known in enumerate((None, None, 3, 2)):
        assert counter.known_before(t) == known
        counter.record(t, remaining)
        remaining -= 1


def test_the_number_of_remaining_sentences_is_read_at_once_on_a_cpu() -> None:
    remaining = torch.tensor([VOCAB])
    counter = RemainingCounter(2, remaining)
    assert counter.known_before(0) is None
    counter.record(0, remaining)
    assert counter.known_before(1) == VOCAB
