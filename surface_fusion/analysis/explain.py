"""Explain a translation token by token: the predictions of each branch and the attention to the source.

Does for single sentences and their translations what ``analyse branches`` and ``analyse align`` do for a data
set.
"""

from pathlib import Path
from typing import Any

from fairseq.data import LanguagePairDataset
from torch import Tensor

from surface_fusion.analysis import align, branches
from surface_fusion.analysis.loaded import Loaded

DECIDES, COPIES = "*", "="


def loaded_pair(model: Any, task: Any, source: Tensor, target: Tensor) -> Loaded:
    """A data set of one sentence and its translation: token ids that end in </s>."""
    sizes = [[len(side)] for side in (source, target)]
    pair: Any = LanguagePairDataset(
        *([source], sizes[0], task.source_dictionary, [target], sizes[1], task.target_dictionary),
        left_pad_source=task.cfg.left_pad_source,
        left_pad_target=task.cfg.left_pad_target,
    )
    task.datasets["typed"] = pair
    return Loaded(model, task, "typed")


def explain(loaded: Loaded, out: Path | None = None) -> list[str]:
    """A table of the only sentence in *loaded*: a line a token, and one of what the marks mean.

    With *out*, also ``branches.csv`` (with surface fusion), ``align_*.csv``, ``.png`` and ``.svg`` in that
    folder, of the same passes of the model.
    """
    words = loaded.task.target_dictionary
    columns = {"token": [words[i] for i in loaded.task.dataset(loaded.split)[0]["target"].tolist()]}
    note = []
    if loaded.setting("surfacefusion") is not None:
        tokens = sorted(branches.tokens(loaded))
        if out is not None:
            branches.save(tokens, words, out)
        columns["p"] = [f"{token.p_fused:.2f}" for token in tokens]
        if tokens[0].gate is not None:
            columns["gate"] = [f"{token.gate:.2f}" for token in tokens]
        columns["target branch"] = [words[token.target] for token in tokens]
        # No word has a space in it, but one may end in a mark.
        columns["surface branch"] = [
            f"{words[token.surface]} {DECIDES * token.decides}{COPIES * token.copies}".rstrip()
            for token in tokens
        ]
        decided, copied = (sum(getattr(t, name) for t in tokens) for name in ("decides", "copies"))
        note.append(
            f"{DECIDES} the surface changed the likeliest token: {decided} of {len(tokens)}; "
            f"{COPIES} it names a token of the source: {copied}"
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
