"""Beam searches with tiny models: by the fast search of this package, and by fairseq's loop."""

from typing import Any

import pytest
import torch
from fairseq.sequence_generator import SequenceGenerator
from torch import Tensor

from surface_fusion import sequence_generator
from surface_fusion.sequence_generator import FastSequenceGenerator
from tests.helpers.tiny import EOS, SHARED, batch, build, shaken

HARD = ("--surfacefusion", "att", "--sf-gate", "0.8", SHARED)

Translations = list[list[dict[str, Tensor]]]


def record_searches(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """A list to which each fast search is appended when it starts."""
    searches: list[Any] = []

    class RecordedSearch(sequence_generator.Search):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            searches.append(self)

    monkeypatch.setattr(sequence_generator, "Search", RecordedSearch)
    return searches


def model_that_ends(*flags: str, seed: int = 1, often: float = 1.4) -> Any:
    """As ``fairseq-generate`` prepares it; hypotheses end now and then."""
    model = shaken(*flags, seed=seed)
    model.make_generation_fast_(beamable_mm_beam_size=None, need_attn=False)
    with torch.no_grad():
        model.decoder.output_projection.weight[EOS] *= often
    return model


def generator_of(model: Any, cls: Any = FastSequenceGenerator, **options: Any) -> Any:
    dictionary = build(SHARED)[1].target_dictionary
    return cls([model], dictionary, **{"beam_size": 3, "max_len_b": 12, **options})


def source_batch(generator: Any, seed: int = 1, sentences: int = 6) -> dict[str, Any]:
    """Source sentences of 2 to 8 tokens, on the generator's device."""
    lengths = tuple(2 + (seed + 3 * i) % 7 for i in range(sentences))
    net = batch(lengths, lengths, seed=seed)["net_input"]
    device = next(generator.model.parameters()).device
    return {"net_input": {k: net[k].to(device) for k in ("src_tokens", "src_lengths")}}


def translations(generator: Any, seed: int = 1, sentences: int = 6, **kwargs: Any) -> Translations:
    """What *generator* returns for :func:`source_batch`."""
    return generator.generate([], source_batch(generator, seed, sentences), **kwargs)


@torch.no_grad()
def fairseq_translations(generator: Any, seed: int = 1, sentences: int = 6, **kwargs: Any) -> Translations:
    """The same by fairseq's loop."""
    return SequenceGenerator._generate(generator, source_batch(generator, seed, sentences), **kwargs)


def assert_same_translations(ours: Translations, expected: Translations) -> None:
    """The same hypotheses in the same order; *ours* on the CPU."""
    assert [len(hypotheses) for hypotheses in ours] == [len(hypotheses) for hypotheses in expected]
    for our_hypotheses, expected_hypotheses in zip(ours, expected, strict=True):
        for a, b in zip(our_hypotheses, expected_hypotheses, strict=True):
            assert a.keys() == b.keys()
            assert a["tokens"].equal(b["tokens"].cpu())
            for name in ("score", "positional_scores", "attention", "alignment"):
                torch.testing.assert_close(a[name], b[name].cpu(), atol=1e-5, rtol=1e-5)
