"""Explain a translation token by token, by the contents of ``analyse branches`` and ``analyse align``."""

from pathlib import Path
from typing import Any

from torch import Tensor

from surface_fusion.analysis import align, branches
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.models.hub_interface import pair_dataset

DECIDES, COPIES = "*", "="


def loaded_pair(model: Any, task: Any, source: Tensor, target: Tensor) -> Loaded:
    """Add a sentence and its translation, ids that end in ``</s>``, to *task* as split ``typed``."""
    task.datasets["typed"] = pair_dataset(task, [source], [target])
    return Loaded(model, task, "typed")


def explain(loaded: Loaded, out: Path | None = None) -> list[str]:
    """Return the lines of a table with a row per token; with surface fusion, the last explains the marks.

    Args:
        loaded: from :func:`loaded_pair`.
        out: folder to also write ``branches*.csv`` (with surface fusion) and ``align_*`` to.
    """
    dictionary = loaded.task.target_dictionary
    columns = {"token": [dictionary[i] for i in loaded.task.dataset(loaded.split)[0]["target"].tolist()]}
    note = []
    if loaded.setting("surfacefusion") is not None:
        tokens = sorted(branches.tokens(loaded))
        if out is not None:
            branches.save(tokens, dictionary, out)
        columns["p"] = [f"{token.p_fused:.2f}" for token in tokens]
        if tokens[0].gate is not None:
            columns["gate"] = [f"{token.gate:.2f}" for token in tokens]
        columns["target branch"] = [dictionary[token.target] for token in tokens]
        # The space separates word and marks: a word contains none, but may end in such a character.
        columns["surface branch"] = [
            f"{dictionary[token.surface]} {DECIDES * token.decides}{COPIES * token.copies}".rstrip()
            for token in tokens
        ]
        decided, copied = (sum(getattr(t, name) for t in tokens) for name in ("decides", "copies"))
        note.append(
            f"{DECIDES} the surface branch changed the most probable token: {decided} of {len(tokens)}; "
            f"{COPIES} its most probable token is in the source: {copied}"
        )
    attentions = align.align(loaded, 0)
    if out is not None:
        align.save(attentions, out)
    for attention in attentions:
        best = attention.weights.max(dim=1)
        columns[f"read by {attention.name}"] = [
            f"{attention.source[i]} {weight:.2f}"
            for i, weight in zip(best.indices.tolist(), best.values.tolist(), strict=True)
        ]
    return [*_table(columns), *note]


def _table(columns: dict[str, list[str]]) -> list[str]:
    rows = [list(columns), *map(list, zip(*columns.values(), strict=True))]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]
