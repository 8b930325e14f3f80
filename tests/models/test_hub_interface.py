"""The hub returns a result for each line, in the order of the lines, whatever the lines contain.

Also tests ``compat/hub.py``.
"""

import logging
import math
import re
from typing import Any

import pytest
import torch
from fairseq.hub_utils import GeneratorHubInterface

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.hub_interface import MAX_TOKENS, TranslationHub
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel
from tests.helpers.paths import REFERENCE

LINES = ["the bird", "a horse sees a house", "the house"]
LONG = "horse " * 1500


def load(**settings: Any) -> TranslationHub:
    hub = SurfaceFusionModel.from_pretrained(
        str(REFERENCE), "checkpoint_best.pt", str(REFERENCE / "data-bin"), **settings
    )
    return hub.eval()


@pytest.fixture(scope="module")
def hub() -> TranslationHub:
    return load()


@pytest.fixture(scope="module")
def alone(hub: TranslationHub) -> list[str]:
    """The translation of each line by itself."""
    return [hub.translate(line, beam=4) for line in LINES]


@pytest.mark.slow
def test_an_overlong_line_gives_an_empty_translation_in_its_place(
    hub: TranslationHub, alone: list[str], caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        assert hub.translate([LINES[0], LONG, *LINES[1:]], beam=4) == [alone[0], "", *alone[1:]]
    assert "line 2 has 1501 subwords, the model takes 1024; its translation is left empty" in caplog.text
    assert hub.sample([LONG, LINES[0]], beam=4) == ["", alone[0]]
    assert hub.translate(LONG) == "" and hub.translate([LONG, LONG]) == ["", ""]
    first, second = hub.generate([hub.encode(LONG), hub.encode(LINES[0])], beam=2)
    assert hub.decode(first[0]["tokens"]) == "" and first[0]["score"] == -math.inf and len(second) == 2


def test_an_overlong_line_gives_an_empty_translation_in_fairseqs_hub(
    hub: TranslationHub, alone: list[str]
) -> None:
    plain = GeneratorHubInterface(hub.cfg, hub.task, list(hub.models)).eval()
    assert plain.translate([LONG, LINES[0]], beam=4) == ["", alone[0]]
    rows = [plain.encode(LONG), plain.encode(LINES[0])]
    found = plain.generate(rows, beam=4, skip_invalid_size_inputs=True)
    assert [plain.decode(each[0]["tokens"]) for each in found] == ["", alone[0]]


def test_nbest_returns_a_list_for_each_line(hub: TranslationHub, alone: list[str]) -> None:
    lists = hub.translate([*LINES, "", LONG], beam=4, nbest=3)
    assert [texts[0] for texts in lists] == [*alone, "", ""]
    assert [len(texts) for texts in lists] == [3, 3, 3, 1, 1] and len(set(lists[1])) == 3
    assert hub.translate(LINES[1], beam=4, nbest=3) == lists[1]
    assert hub.translate(LINES[1], beam=4, nbest=1) == alone[1]
    rows = [hub.encode(line) for line in LINES]
    assert [len(each) for each in hub.generate(rows, beam=4, nbest=2)] == [2, 2, 2]
    assert [len(each) for each in hub.generate(rows, beam=4)] == [4, 4, 4]
    assert len(hub.generate(rows[0], beam=4, nbest=2)) == 2
    with pytest.raises(SurfaceFusionError, match="nbest 5 with beam 2; give a number from 1 to 2"):
        hub.translate(LINES, beam=2, nbest=5)


def test_an_empty_line_gives_an_empty_translation(hub: TranslationHub, alone: list[str]) -> None:
    assert hub.translate("") == hub.translate(" \t\u2028 ") == ""
    assert hub.translate(["", LINES[0], "  "], beam=4) == ["", alone[0], ""]
    assert hub.translate([]) == []


@pytest.mark.slow
def test_batch_limits_of_the_training_do_not_apply(alone: list[str]) -> None:
    settings = load().cfg.dataset
    assert (settings.max_tokens, settings.batch_size) == (MAX_TOKENS, None)
    small = load(max_tokens=4)  # what the user gives is one, but for a line that is longer
    assert small.cfg.dataset.max_tokens == 4 and small.translate(LINES, beam=4) == alone
    assert small.cfg.dataset.max_tokens == 4
    assert load(batch_size=1).cfg.dataset.batch_size == 1


def test_scores_of_given_translations(hub: TranslationHub) -> None:
    """The translation that the model made has the scores that the search gave it."""
    sources = [hub.encode(line) for line in LINES]
    made = [each[0] for each in hub.generate(sources, beam=4)]
    texts = [hub.decode(each["tokens"]) for each in made]
    scored = hub.score([LINES[0], LONG, *LINES[1:]], [texts[0], "x", *texts[1:]])
    for ours, theirs in zip([scored[0], *scored[2:]], made, strict=True):
        assert torch.equal(ours["tokens"], theirs["tokens"])
        torch.testing.assert_close(ours["positional_scores"], theirs["positional_scores"])
    assert scored[1]["score"] == -math.inf
    torch.testing.assert_close(hub.score(LINES[0], texts[0])["score"], scored[0]["score"])
    for translations in (None, texts[:2], texts[0]):
        with pytest.raises(SurfaceFusionError, match=r"score: 3 sentences but \d translations; give one"):
            hub.score(LINES, translations)


@pytest.mark.parametrize(
    "settings, line",
    [
        ({"lenpenn": 2.0}, "lenpenn is not a generation setting; did you mean lenpen?"),
        ({"beam": 0}, "--beam 0: give a number of at least 1"),
        ({"temperature": 0}, "--temperature 0: give a number above 0"),
        ({"lenpen": math.nan}, "--lenpen nan: give a number in [-100, 100]"),
    ],
)
def test_invalid_settings_are_refused(hub: TranslationHub, settings: dict[str, Any], line: str) -> None:
    with pytest.raises(SurfaceFusionError, match=re.escape(line)):
        hub.translate(LINES, **settings)
    if "beam" not in settings:
        with pytest.raises(SurfaceFusionError, match=re.escape(line)):
            hub.score(LINES, LINES, **settings)


def test_settings_of_fairseqs_generate_are_accepted(hub: TranslationHub, alone: list[str]) -> None:
    """Those of fairseq's ``generate``, and those that its hub takes on loading."""
    assert hub.translate(LINES, beam=4, nbest=None, skip_invalid_size_inputs=True, lenpen=1.0) == alone
    given = load(generation_args={"lenpen": 0.5}, nbest=2)
    assert given.cfg.generation.lenpen == 0.5
    assert len(given.translate(LINES[0], beam=4)) == 2


@pytest.mark.slow
def test_the_architecture_may_be_named(alone: list[str]) -> None:
    assert load(arch="transformer_surface_fusion").translate(LINES, beam=4) == alone
