"""Which generator ``build_generator`` returns, when it uses the fast search, and its results.

Also tests ``hooks/generator_hook.py``.
"""

import json
import math
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import search
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from fairseq.tasks.translation import TranslationTask

from surface_fusion.cli.main import main
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel
from surface_fusion.sequence_generator import FastSequenceGenerator, FastSequenceGeneratorWithAlignment
from tests.helpers.beam_search import (
    HARD,
    assert_same_translations,
    fairseq_translations,
    generator_of,
    model_that_ends,
    record_searches,
    source_batch,
    translations,
)
from tests.helpers.paths import REFERENCE
from tests.helpers.tiny import SHARED, batch, build, shaken


@pytest.fixture
def searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """The fast searches that ran."""
    return record_searches(monkeypatch)


class UserGenerator(SequenceGenerator):
    """A user's class."""


class UserTask(TranslationTask):
    """A task that overrides ``build_generator`` as fairseq's own tasks do."""

    def build_generator(
        self, models: Any, args: Any, seq_gen_cls: Any = None, extra_gen_cls_kwargs: Any = None
    ) -> Any:
        return super().build_generator(
            models, args, seq_gen_cls=None, extra_gen_cls_kwargs=extra_gen_cls_kwargs
        )


# The class that build_generator chooses

OTHERS = {
    "--sf-plain": lambda: [shaken(*HARD, "--sf-plain")],
    "fairseq's Transformer": lambda: [shaken(SHARED, arch="transformer")],
    "an ensemble with fairseq's Transformer": lambda: [shaken(*HARD), shaken(SHARED, arch="transformer")],
    "no fast decoding": lambda: [shaken(*HARD, "--cross-self-attention")],
}


@pytest.mark.parametrize("task_class", [TranslationTask, UserTask])
def test_fast_generators_for_models_of_this_package(task_class: type) -> None:
    model, task = build(*HARD)
    task.__class__ = task_class
    for models in ([model], [model, model], torch.nn.ModuleList([model]), EnsembleModel([model])):
        assert type(task.build_generator(models, Namespace(beam=2))) is FastSequenceGenerator
    for kind in ("hard", "soft"):
        kwargs: dict[str, Any] = {"symbols_to_strip_from_output": {7}}
        arguments = Namespace(beam=2, print_alignment=kind)
        generator = task.build_generator([model], arguments, extra_gen_cls_kwargs=kwargs)
        assert type(generator) is FastSequenceGeneratorWithAlignment
        assert generator.extract_alignment.__name__ == f"extract_{kind}_alignment"
        assert 7 in generator.symbols_to_strip_from_output and "print_alignment" not in kwargs


@pytest.mark.parametrize("models", OTHERS.values(), ids=list(OTHERS))
def test_fairseqs_own_generators_for_all_others(models: Callable[[], list[Any]]) -> None:
    _, task = build(*HARD)
    assert type(task.build_generator(models(), Namespace(beam=2))) is SequenceGenerator
    aligner = task.build_generator(models(), Namespace(beam=2, print_alignment="hard"))
    assert type(aligner) is SequenceGeneratorWithAlignment


def test_a_class_of_the_caller_and_the_scorer_are_kept() -> None:
    model, task = build(*HARD)
    generator = task.build_generator([model], Namespace(beam=2), seq_gen_cls=UserGenerator)
    assert type(generator) is UserGenerator
    scorer = task.build_generator([model], Namespace(score_reference=True, print_alignment="hard"))
    assert type(scorer) is SequenceScorer and scorer.compute_alignment
    assert type(task.build_generator(None, Namespace(score_reference=True))) is SequenceScorer


def test_the_search_strategy_is_fairseqs_choice(searches: list[Any]) -> None:
    """It then runs in fairseq's loop, with the same result."""
    model, task = model_that_ends(*HARD), build(*HARD)[1]
    for kind, options in (
        (search.BeamSearch, {}),
        (search.Sampling, {"sampling": True, "sampling_topk": 5}),
        (search.DiverseBeamSearch, {"diverse_beam_groups": 2, "beam": 4}),
        (search.DiverseSiblingsSearch, {"diversity_rate": 0.5}),
        (search.PrefixConstrainedBeamSearch, {"prefix_allowed_tokens_fn": lambda *_: [2, 5, 6, 7]}),
    ):
        arguments = Namespace(**{"beam": 3, "max_len_b": 12, **options})
        results = []
        for cls in (None, SequenceGenerator):
            generator = task.build_generator([model], arguments, seq_gen_cls=cls)
            assert type(generator) is (cls or FastSequenceGenerator) and type(generator.search) is kind
            torch.manual_seed(1)
            results.append(translations(generator))
        assert_same_translations(*results)
    assert len(searches) == 1


# Commands and the hub


@pytest.mark.slow
def test_generate_and_interactive(searches: list[Any], tmp_path: Path) -> None:
    (tmp_path / "text").write_text("the bird\na horse sees a house\n")
    model = (str(REFERENCE / "data-bin"), "--path", str(REFERENCE / "checkpoint_best.pt"))
    settings = (*model, "--cpu", "--beam", "2", "--num-workers", "0")
    assert main(["generate", *settings, "--max-len-b", "5", "--batch-size", "80"]) == 0
    assert searches
    searches.clear()
    assert main(["interactive", *settings, "--input", str(tmp_path / "text")]) == 0
    assert len(searches) == 2
    plain = ("--model-overrides", "{'sf_plain': True}")
    assert main(["interactive", *settings, "--input", str(tmp_path / "text"), *plain]) == 0
    assert len(searches) == 2


@pytest.mark.slow
def test_hub(searches: list[Any]) -> None:
    hub = SurfaceFusionModel.from_pretrained(
        str(REFERENCE), "checkpoint_best.pt", str(REFERENCE / "data-bin")
    )
    assert hub.eval().translate("the bird") and len(searches) == 1


@pytest.mark.parametrize("flags", [(), ("--sf-plain",)])
def test_validation_with_bleu(flags: tuple[str, ...], searches: list[Any]) -> None:
    """``--eval-bleu`` builds its generator while the model is built, in training mode."""
    settings = json.dumps({"beam": 2, "max_len_b": 5})
    model, task = build(
        *HARD, *flags, "--eval-bleu", "--eval-bleu-args", settings, "--eval-bleu-detok", "space"
    )
    criterion = task.build_criterion(
        Namespace(criterion="cross_entropy", _name="cross_entropy", sentence_avg=False)
    )
    _, _, logged = task.valid_step(batch(), model.eval(), criterion)
    assert logged["_bleu_ref_len"] > 0 and len(searches) == (0 if flags else 1)


# When the fast search runs


@pytest.mark.parametrize(
    ("options", "kwargs"),
    [
        ({"match_source_len": True}, {}),
        ({"no_repeat_ngram_size": 2}, {}),
        ({"search_strategy": "diverse"}, {}),
        ({"beam_size": 31}, {}),
        ({}, {"prefix_tokens": torch.full((6, 1), 9)}),
        ({}, {"bos_token": torch.tensor([7])}),
        ({"max_len_b": -1, "min_len": -3}, {}),
    ],
    ids=["match_source_len", "ngrams", "diverse", "few tokens", "prefix", "first tokens", "no step at all"],
)
def test_requests_that_fairseqs_loop_serves(
    options: dict[str, Any], kwargs: dict[str, Any], searches: list[Any]
) -> None:
    if "search_strategy" in options:
        options = {"search_strategy": search.DiverseBeamSearch(build(SHARED)[1].target_dictionary, 3, 0.5)}
    generator = generator_of(model_that_ends(), **options)
    assert_same_translations(translations(generator, **kwargs), fairseq_translations(generator, **kwargs))
    assert not searches


class UserEnsemble(EnsembleModel):
    """A user's class."""


class UserFastGenerator(FastSequenceGenerator):
    """A user's class, which may rely on any method of fairseq's."""


CHANGES = {
    "ensemble": lambda generator: generator.model.__init__([generator.model.single_model] * 2),
    "a user's ensemble": lambda generator: setattr(generator.model, "__class__", UserEnsemble),
    "a user's generator": lambda generator: setattr(generator, "__class__", UserFastGenerator),
    "step": lambda generator: setattr(generator.search, "step", generator.search.step),
    "finalize_hypos": lambda generator: setattr(generator, "finalize_hypos", generator.finalize_hypos),
    "decoder.forward": lambda generator: setattr(
        generator.model.single_model.decoder, "forward", generator.model.single_model.decoder.forward
    ),
    "training": lambda generator: generator.model.single_model.decoder.train(),
    "sf_plain": lambda generator: setattr(generator.model.single_model.decoder.cfg, "sf_plain", True),
}


@pytest.mark.parametrize("change", CHANGES.values(), ids=list(CHANGES))
def test_models_changed_by_the_user_run_in_fairseqs_loop(
    change: Callable[[Any], None], searches: list[Any]
) -> None:
    generator = generator_of(model_that_ends(*HARD))
    assert translations(generator) and len(searches) == 1
    change(generator)
    assert translations(generator) and len(searches) == 1


def test_fairseqs_loop_if_gradients_are_enabled(searches: list[Any]) -> None:
    """``_generate`` called directly, without ``no_grad``."""
    generator = generator_of(model_that_ends(*HARD))
    assert generator._generate(source_batch(generator)) and not searches


# Results


def test_first_token(searches: list[Any]) -> None:
    generator = generator_of(model_that_ends(*HARD))
    expected = fairseq_translations(generator, bos_token=7)
    assert_same_translations(translations(generator, bos_token=7), expected)
    assert len(searches) == 1


@pytest.mark.parametrize("kind", ["hard", "soft"])
def test_alignments(kind: str, searches: list[Any]) -> None:
    """``--print-alignment``."""
    model = model_that_ends(*HARD)
    model.decoder.layers[-1].need_attn = True
    ours, theirs = (
        translations(generator_of(model, cls, print_alignment=kind))
        for cls in (FastSequenceGeneratorWithAlignment, SequenceGeneratorWithAlignment)
    )
    assert len(searches) == 1
    for our_hypotheses, their_hypotheses in zip(ours, theirs, strict=True):
        for hypotheses in zip(our_hypotheses, their_hypotheses, strict=True):
            a, b = (torch.tensor([[*map(float, row)] for row in h["alignment"]]) for h in hypotheses)
            torch.testing.assert_close(a, b, atol=2e-6, rtol=0)  # soft ones have six digits
            assert len(a)
    model.full_context_alignment = True
    translations(generator_of(model, FastSequenceGeneratorWithAlignment))
    assert len(searches) == 1  # fairseq would read hypotheses on the CPU with a model on the GPU
    translations(generator_of(model))
    assert searches
    searches.clear()


def test_hypotheses_share_no_memory(searches: list[Any]) -> None:
    results = translations(generator_of(model_that_ends(*HARD)))
    for name in ("attention", "alignment"):
        results[0][0][name].resize_(3)
        assert results[0][1][name].shape == results[1][0][name].shape == (0,)
    assert searches


def test_a_model_whose_output_is_nan(searches: list[Any]) -> None:
    model = model_that_ends(*HARD)
    with torch.no_grad():
        model.decoder.layers[0].fc1.bias.fill_(math.nan)
    with pytest.raises(SurfaceFusionError, match="sentence 0 of the batch has no translation"):
        translations(generator_of(model))
    assert searches


def test_min_len_above_max_len() -> None:
    with pytest.raises(AssertionError, match="min_len cannot be larger than max_len"):
        translations(generator_of(model_that_ends(*HARD), min_len=20))


def test_torchscript_names_the_decoder() -> None:
    model, task = build(*HARD)
    generator = task.build_generator([model], Namespace(beam=2))
    with pytest.raises(SurfaceFusionError, match=r"^torch\.jit\.script cannot compile SurfaceFusion"):
        torch.jit.script(generator)
