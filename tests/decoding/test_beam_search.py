"""A search that stays on the device finds what fairseq's loop finds."""

import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from fairseq.search import BeamSearch, DiverseBeamSearch
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from torch import Tensor

from surface_fusion import sequence_generator
from surface_fusion.decoding import beam_search
from surface_fusion.decoding.beam_search import Waiting
from surface_fusion.errors import SurfaceFusionError
from tests.helpers.tiny import EOS, SHARED, VOCAB, batch, build, shaken

HARD = ("--surfacefusion", "att", "--sf-gate", "0.8", SHARED)
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
Translations = list[list[dict[str, Tensor]]]


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Those of ours that ran."""
    made: list[Any] = []

    class Counted(sequence_generator.Search):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            made.append(self)

    monkeypatch.setattr(sequence_generator, "Search", Counted)
    return made


def model_that_ends(*flags: str, seed: int = 1, often: float = 1.4) -> Any:
    """As ``fairseq-generate`` prepares it; hypotheses end now and then."""
    model = shaken(*flags, seed=seed)
    model.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
    with torch.no_grad():
        model.decoder.output_projection.weight[EOS] *= often
    return model


def generator_of(model: Any, **options: Any) -> SequenceGenerator:
    dictionary = build(SHARED)[1].target_dictionary
    return SequenceGenerator([model], dictionary, **{"beam_size": 3, "max_len_b": 12, **options})


def translations(
    generator: SequenceGenerator, seed: int, sentences: int = 6, plain: bool = False, **asked: Any
) -> Translations:
    lengths = tuple(2 + (seed + 3 * i) % 7 for i in range(sentences))
    net = batch(lengths, lengths, seed=seed)["net_input"]
    device = next(generator.model.parameters()).device
    sample = {"net_input": {k: net[k].to(device) for k in ("src_tokens", "src_lengths")}}
    if plain:
        fairseqs: Any = SequenceGenerator._generate
        with torch.no_grad():
            return fairseqs.__wrapped__(generator, sample, **asked)
    return generator.generate([], sample, **asked)


def assert_same(found: Translations, expected: Translations) -> None:
    assert [len(several) for several in found] == [len(several) for several in expected]
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            assert one.keys() == other.keys()
            assert one["tokens"].equal(other["tokens"].cpu())
            for name in ("score", "positional_scores", "attention", "alignment"):
                torch.testing.assert_close(one[name], other[name].cpu(), atol=1e-5, rtol=1e-5)


@STATIC
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("flags", MODELS.values(), ids=list(MODELS))
def test_the_same_translations(
    flags: tuple[str, ...], options: dict[str, Any], static: bool, searches: list[Any]
) -> None:
    model = model_that_ends(*flags)
    model.decoder.fast_decoding.static = static
    generator = generator_of(model, **options)
    for seed in range(3):
        expected = translations(generator, seed, plain=True)
        assert_same(translations(generator, seed), expected)
    assert len(searches) == 3


@STATIC
def test_sentences_that_end_at_different_times(static: bool, searches: list[Any]) -> None:
    """The cache is left for smaller ones, and for longer ones."""
    model = model_that_ends(*HARD, seed=3, often=3)
    model.decoder.fast_decoding.static = static
    generator = generator_of(model, max_len_b=75)
    found = translations(generator, 5, sentences=17)
    assert_same(found, translations(generator, 5, sentences=17, plain=True))
    caches = [(since, len(sentences)) for since, sentences, _ in searches[0]._done]
    assert len(caches) > 3 and caches[0][1] == 17 and caches[-1][1] == 6
    assert len({len(hypothesis["tokens"]) for several in found for hypothesis in several}) == 5


def test_the_vocabulary_in_parts(searches: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """No more logits at a time than fit: here those of two sentences, and of one at the end."""
    monkeypatch.setattr(beam_search, "MOST_LOGITS", 2 * 3 * 2 * VOCAB + 1)
    asked: list[int] = []
    model = model_that_ends(*HARD)
    project = model.decoder.output_layer
    monkeypatch.setattr(model.decoder, "output_layer", lambda x: asked.append(len(x)) or project(x))
    generator = generator_of(model)
    found = translations(generator, 1, sentences=5)
    assert asked[:3] == [6, 6, 3] and len(searches) == 1
    assert_same(found, translations(generator, 1, sentences=5, plain=True))


@STATIC
@pytest.mark.parametrize("beam", [2, 4])
def test_words_that_are_equally_good(static: bool, beam: int, searches: list[Any]) -> None:
    """topk prefers one of equals by the size of the whole, so it has to be fairseq's."""
    model = model_that_ends()
    with torch.no_grad():
        model.decoder.output_projection.weight[30:60] = model.decoder.output_projection.weight[10:40].clone()
    model.decoder.fast_decoding.static = static
    generator = generator_of(model, beam_size=beam)
    for seed in range(12):
        assert_same(translations(generator, seed), translations(generator, seed, plain=True))
    assert len(searches) == 12


@pytest.mark.parametrize("with_attention", [False, True], ids=["", "with attention"])
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("flags", MODELS.values(), ids=list(MODELS))
def test_other_precisions(
    flags: tuple[str, ...], dtype: torch.dtype, with_attention: bool, searches: list[Any]
) -> None:
    model = model_that_ends(*flags).to(dtype)
    model.decoder.layers[-1].need_attn = with_attention
    generator = generator_of(model)
    found, expected = translations(generator, 1), translations(generator, 1, plain=True)
    assert_same(found, expected)
    assert searches and found[0][0]["score"].dtype == expected[0][0]["score"].dtype


def test_what_each_token_was_chosen_from(searches: list[Any]) -> None:
    """As validation with ``--eval-bleu`` asks for it; caches are left, and used again without and with it."""
    for static in (False, True):
        model = model_that_ends(*HARD, seed=3, often=3)
        model.decoder.fast_decoding.static = static
        generator = generator_of(model, max_len_b=75)
        for wanted in (False, True, False, True):
            model.decoder.layers[-1].need_attn = wanted
            for seed, sentences in ((5, 17), (2, 6)):
                found = translations(generator, seed, sentences)
                assert_same(found, translations(generator, seed, sentences, plain=True))
                source = 2 + max((seed + 3 * i) % 7 for i in range(sentences))
                shape = (source, len(found[0][0]["tokens"])) if wanted else (0,)
                assert found[0][0]["attention"].shape == shape
    assert len(searches) == 16


def test_attention_begun_in_inference_mode(searches: list[Any]) -> None:
    model = model_that_ends(*HARD)
    model.decoder.fast_decoding.static = True
    model.decoder.layers[-1].need_attn = True
    generator = generator_of(model)
    with torch.inference_mode():
        translations(generator, 1)
    cache = searches.pop().state.lease.cache
    assert_same(translations(generator, 1), translations(generator, 1, plain=True))
    assert searches.pop().state.lease.cache is cache


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_alignments(kind: str, searches: list[Any]) -> None:
    """``--print-alignment``."""
    model = model_that_ends(*HARD)
    model.decoder.layers[-1].need_attn = True
    dictionary = build(SHARED)[1].target_dictionary
    generator = SequenceGeneratorWithAlignment(
        [model], dictionary, beam_size=3, max_len_b=12, print_alignment=kind
    )
    found = translations(generator, 1)
    assert len(searches) == 1
    model.decoder.cfg.sf_plain = True  # and now by fairseq's loop
    expected = translations(generator, 1)
    assert len(searches) == 1
    for ours, theirs in zip(found, expected, strict=True):
        for one, other in zip(ours, theirs, strict=True):
            numbers = [
                torch.tensor([[float(x) for x in row] for row in hypothesis["alignment"]])
                for hypothesis in (one, other)
            ]
            torch.testing.assert_close(*numbers, atol=2e-6, rtol=0)  # soft ones have six digits
            assert len(numbers[0])
    model.decoder.cfg.sf_plain, model.full_context_alignment = False, True
    translations(generator, 1)
    assert len(searches) == 1  # fairseq would read hypotheses on the CPU with a model on the GPU
    translations(generator_of(model), 1)
    assert len(searches) == 2


def test_hypotheses_share_nothing(searches: list[Any]) -> None:
    found = translations(generator_of(model_that_ends(*HARD)), 1)
    for name in ("attention", "alignment"):
        found[0][0][name].resize_(3)
        assert found[0][1][name].shape == found[1][0][name].shape == (0,)
    assert searches


def test_another_first_token(searches: list[Any]) -> None:
    generator = generator_of(model_that_ends(*HARD))
    expected = translations(generator, 1, plain=True, bos_token=7)
    assert_same(translations(generator, 1, bos_token=7), expected)
    assert len(searches) == 1


class Other(SequenceGenerator):
    """Somebody's own."""


@pytest.mark.parametrize(
    ("options", "asked"),
    [
        ({"match_source_len": True}, {}),
        ({"no_repeat_ngram_size": 2}, {}),
        ({"search_strategy": "diverse"}, {}),
        ({"beam_size": 31}, {}),
        ({}, {"prefix_tokens": torch.full((6, 1), 9)}),
        ({}, {"bos_token": torch.tensor([7])}),
        ({"max_len_b": -1, "min_len": -3}, {}),
    ],
    ids=["match_source_len", "ngrams", "diverse", "few words", "prefix", "first tokens", "no step at all"],
)
def test_what_fairseq_does_itself(
    options: dict[str, Any], asked: dict[str, Any], searches: list[Any]
) -> None:
    model = model_that_ends()
    if "search_strategy" in options:
        options = {"search_strategy": DiverseBeamSearch(build(SHARED)[1].target_dictionary, 3, 0.5)}
    generator = generator_of(model, **options)
    assert_same(translations(generator, 1, **asked), translations(generator, 1, plain=True, **asked))
    assert not searches and isinstance(generator_of(model).search, BeamSearch)


class OtherEnsemble(EnsembleModel):
    """Somebody's own."""


WHOSE = {
    "ensemble": lambda generator: generator.model.__init__([generator.model.single_model] * 2),
    "another ensemble": lambda generator: setattr(generator.model, "__class__", OtherEnsemble),
    "another generator": lambda generator: setattr(generator, "__class__", Other),
    "another step": lambda generator: setattr(generator.search, "step", generator.search.step),
    "another end": lambda generator: setattr(generator, "finalize_hypos", generator.finalize_hypos),
    "another decoder": lambda generator: setattr(
        generator.model.single_model.decoder, "forward", generator.model.single_model.decoder.forward
    ),
    "training": lambda generator: generator.model.single_model.decoder.train(),
}


@pytest.mark.parametrize("change", WHOSE.values(), ids=list(WHOSE))
def test_whose_search_is_fairseqs(change: Callable[[Any], None], searches: list[Any]) -> None:
    generator = generator_of(model_that_ends(*HARD))
    assert translations(generator, 1) and len(searches) == 1
    change(generator)
    assert translations(generator, 1) and len(searches) == 1


def test_plain_takes_fairseqs_search(searches: list[Any]) -> None:
    assert translations(generator_of(model_that_ends(*HARD, "--sf-plain")), 1) and not searches


def test_where_gradients_are_asked_for(searches: list[Any]) -> None:
    """Whoever calls ``_generate`` itself, without ``no_grad``, gets fairseq's."""
    generator, net = generator_of(model_that_ends(*HARD)), batch()["net_input"]
    sample = {"net_input": {k: net[k] for k in ("src_tokens", "src_lengths")}}
    assert generator._generate(sample) and not searches


def test_a_model_that_gives_no_numbers(searches: list[Any]) -> None:
    model = model_that_ends(*HARD)
    with torch.no_grad():
        model.decoder.layers[0].fc1.bias.fill_(math.nan)
    with pytest.raises(SurfaceFusionError, match="sentence 0 of the batch has no translation"):
        translations(generator_of(model), 1)
    assert searches


def test_shortest_longer_than_longest(searches: list[Any]) -> None:
    with pytest.raises(AssertionError, match="min_len cannot be larger than max_len"):
        translations(generator_of(model_that_ends(*HARD), min_len=20), 1)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("options", OPTIONS.values(), ids=list(OPTIONS))
@pytest.mark.parametrize("flags", MODELS.values(), ids=list(MODELS))
def test_on_a_gpu(flags: tuple[str, ...], options: dict[str, Any]) -> None:
    """Graphs are recorded and replayed, on caches that other batches have used."""
    model = model_that_ends(*flags).cuda()
    generator = generator_of(model, **options)
    for seed, sentences in enumerate((17, 6, 17, 16, 1, 17, 6)):
        model.decoder.layers[-1].need_attn = seed in (2, 3, 5)
        found = translations(generator, seed, sentences)
        assert not found[0][0]["tokens"].is_cuda
        assert_same(found, translations(generator, seed, sentences, plain=True))
    assert model.decoder.fast_decoding.graphs


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_the_host_asks_a_step_late_on_a_gpu() -> None:
    left = torch.tensor([3], device="cuda")
    waiting = Waiting(4, left)
    for t, known in enumerate((None, None, 3, 2)):
        assert waiting.left_before(t) == known
        waiting.read_after(t, left)
        left -= 1


def test_the_host_knows_at_once_on_a_cpu() -> None:
    left = torch.tensor([VOCAB])
    waiting = Waiting(2, left)
    assert waiting.left_before(0) is None
    waiting.read_after(0, left)
    assert waiting.left_before(1) == VOCAB
