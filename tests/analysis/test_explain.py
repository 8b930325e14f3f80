"""The table of ``translate --explain`` equals the measurements of ``branches`` and ``align``.

Also tests ``analysis/align.py``.
"""

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from surface_fusion.analysis import align, branches
from surface_fusion.analysis.explain import explain, loaded_pair
from tests.helpers.tiny import build

HARD = ("--surfacefusion", "att", "--sf-gate", "0.8")


def pair(*flags: str) -> Any:
    model, task = build(*flags)
    source, target = torch.tensor([5, 6, 7, 2]), torch.tensor([8, 5, 2])
    return loaded_pair(model.eval(), task, source, target)


def test_the_table_has_a_line_for_each_token() -> None:
    loaded = pair(*HARD)
    head, *lines, note = explain(loaded)
    tokens = sorted(branches.tokens(loaded))
    words = loaded.task.target_dictionary
    assert len(lines) == len(tokens) == 3
    for line, token in zip(lines, tokens, strict=True):
        word, p, gate, target, surface, *_ = re.split("  +", line)
        surface, _, marks = surface.partition(" ")
        assert (word, target, surface) == tuple(
            words[i] for i in (token.reference, token.target, token.surface)
        )
        assert (p, gate) == (f"{token.p_fused:.2f}", "0.80")
        assert marks == "*" * token.decides + "=" * token.copies
    decided = sum(token.decides for token in tokens)
    assert f"changed the most probable token: {decided} of 3" in note
    surface = align.align(loaded, 0)[0]
    best = surface.weights[0].max()
    assert f"{surface.source[int(surface.weights[0].argmax())]} {best:.2f}" in lines[0]
    assert head.split("  ")[0] == "token"


def test_marks_stand_apart_from_words_that_end_in_them(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = pair(*HARD)
    words = loaded.task.target_dictionary
    words.symbols = [f"{word}*=" for word in words.symbols]
    first, second, third = sorted(branches.tokens(loaded))
    marked = [first._replace(decides=True, copies=True), second._replace(copies=True), third]
    monkeypatch.setattr(branches, "tokens", lambda loaded: marked)
    _, *lines, note = explain(loaded)
    for line, token, marks in zip(lines, marked, (" *=", " =", ""), strict=True):
        assert re.split("  +", line)[4] == words[token.surface] + marks
    assert "token: 1 of 3; = its most probable token is in the source: 2" in note


@pytest.mark.slow
def test_writing_files_runs_the_model_no_further_time(tmp_path: Path) -> None:
    """One pass for the branches and one for the attentions, whether or not they are written down."""
    loaded = pair(*HARD)
    passes: list[object] = []
    loaded.model.register_forward_hook(lambda *_: passes.append(None))
    table = explain(loaded)
    assert len(passes) == 2
    assert explain(loaded, tmp_path) == table and len(passes) == 4
    branches.write(loaded, tmp_path / "again")
    align.draw(loaded, tmp_path / "again", 0)
    made = sorted(path.name for path in (tmp_path / "again").iterdir())
    assert "branches.csv" in made and "align_surface.svg" in made
    for name in made:
        if name.endswith(".csv"):
            assert (tmp_path / name).read_text() == (tmp_path / "again" / name).read_text()
        assert (tmp_path / name).stat().st_size > 0


@pytest.mark.parametrize(("flags", "column"), [(("--sf-mode", "soft"), "gate"), ((), "branch")])
def test_columns_that_a_model_lacks_are_left_out(flags: tuple[str, ...], column: str) -> None:
    fusion = ("--surfacefusion", "att", *flags) if flags else ()
    head, *lines = explain(pair(*fusion))
    assert column not in head and "read by decoder" in head
    assert sum(line.startswith("</s>") for line in lines) == 1


def test_a_pair_longer_than_a_batch_is_explained() -> None:
    """The 4,000 tokens of a batch are no limit of a sentence."""
    loaded = pair(*HARD)
    assert [batch["id"].tolist() for batch in loaded.batches(max_tokens=2)] == [[0]]


def test_tokens_of_markup_are_explained_and_drawn(tmp_path: Path) -> None:
    loaded = pair(*HARD)
    words = loaded.task.target_dictionary
    words.symbols = [f"${word}_{{" for word in words.symbols[:4]] + [
        "$\\frac$",
        "<b>&$x^$",
        "\\$",
        "a$$_b",
        "$",
    ] * 12
    lines = explain(loaded, tmp_path)
    assert sum("$" in line for line in lines) >= 3
    assert (tmp_path / "align_surface.svg").exists() and (tmp_path / "branches.csv").exists()
