"""``Translator`` agrees with the verbs and with the hub, whatever segmented the text."""

import io
import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from surface_fusion import SurfaceFusionError, Translator
from surface_fusion.cli.main import main
from tests.helpers.model_folder import train_model_folder

LINES = ["Good morning.", "", "word " * 100, "Tom is here."]


@pytest.fixture(scope="module", params=["sentencepiece", "subword_nmt", "words"])
def folder(tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest) -> Path:
    return train_model_folder(tmp_path_factory.mktemp(request.param), request.param)


@pytest.fixture(scope="module")
def translator(folder: Path) -> Translator:
    return Translator(folder, device="cpu")


def verb(folder: Path, monkeypatch: Any, capsys: Any, *flags: str) -> list[str]:
    monkeypatch.setattr(sys, "stdin", io.StringIO("\n".join(LINES)))
    capsys.readouterr()
    assert main(["translate", str(folder), "--cpu", *flags]) == 0
    return capsys.readouterr().out.split("\n")[:-1]


def test_each_line_has_one_translation_in_order(translator: Translator, caplog: Any) -> None:
    results = translator.translate(LINES)
    assert [i for i, result in enumerate(results) if not result.text] == [1, 2]
    assert results[1].score == results[2].score == -math.inf
    assert "line 3 has" in caplog.text
    assert results[0].text == translator.translate(LINES[0]).text
    text = "".join(result.text for result in results)
    assert "\u2581" not in text and "@@" not in text


def test_scores_are_mean_log_probabilities(translator: Translator) -> None:
    best = translator.translate(LINES[0])
    assert best.tokens[-1] == "</s>" and len(best.tokens) == len(best.token_scores) == len(best.ids)
    assert best.score == pytest.approx(sum(best.token_scores) / len(best.tokens), abs=1e-5)
    unnormalised = translator.translate(LINES[0], lenpen=0.0)
    assert unnormalised.score == pytest.approx(sum(unnormalised.token_scores), abs=1e-5)


def test_given_translations_are_scored_as_found(translator: Translator) -> None:
    best = translator.translate(LINES[0])
    scored = translator.score(LINES[0], best.text)
    if scored.ids == best.ids:  # the text may be segmented otherwise
        assert scored.score == pytest.approx(best.score, abs=1e-5)
    assert translator.score([LINES[0]], [best.text])[0].ids == scored.ids
    with pytest.raises(SurfaceFusionError, match="2 sentences but 1 translations"):
        translator.score(["a", "b"], ["a"])


def test_nbest_lists_are_sorted(translator: Translator) -> None:
    lists = translator.nbest(LINES, 3, beam=4)
    assert len(lists[0]) == 3 and len(lists[1]) == 1
    assert [t.score for t in lists[0]] == sorted((t.score for t in lists[0]), reverse=True)
    assert lists[0][0].ids == translator.translate(LINES[0]).ids
    with pytest.raises(SurfaceFusionError, match="nbest 5 with beam 4"):
        translator.nbest(LINES, 5)


def test_explanations_have_a_row_for_each_token(translator: Translator, tmp_path: Path) -> None:
    best = translator.translate(LINES[0])
    table = translator.explain(LINES[0], best, tmp_path / "out")
    assert table == translator.explain(LINES[0])
    assert [row.split()[0] for row in table.split("\n")[1:-1]] == best.tokens
    assert (tmp_path / "out" / "branches.csv").is_file()
    assert translator.explain(LINES[0], "Bine .").split("\n")[0].startswith("token")


def test_the_verb_prints_the_same(
    folder: Path, translator: Translator, monkeypatch: Any, capsys: Any
) -> None:
    lists = translator.nbest(LINES, 2)
    expected = [t.text for t in lists[0]] + ["", ""] * 2 + [t.text for t in lists[3]]
    assert verb(folder, monkeypatch, capsys, "--nbest", "2") == expected
    scored = verb(folder, monkeypatch, capsys, "--scores", "--lenpen", "0.5", "--batch-size", "1")
    for line, result in zip(scored, translator.translate(LINES, lenpen=0.5), strict=True):
        score, _, text = line.partition("\t")
        assert text == result.text and float(score) == pytest.approx(result.score, abs=1e-4)
    explained = verb(folder, monkeypatch, capsys, "--explain")
    assert sum(not line.startswith("    ") for line in explained) == len(LINES)


def test_half_precision_and_the_moses_tokenizer(folder: Path) -> None:
    translator = Translator(folder, device="cpu", half=True, moses=True)
    assert next(translator.hub.parameters()).dtype == torch.float16
    assert translator.hub.tokenize("Where's Tom?") == "Where &apos;s Tom ?"
