"""Geometry of the source and target embeddings, optionally compared with those of another model.

* Singular values: ``log(sigma_i / sigma_1)`` of each embedding matrix. The flatter the curve, the more
  directions the embeddings use.
* PCA: the most frequent words of each side, projected onto the first two principal components.
* Neighbours: the target words with the largest cosine for each of the most frequent source words. With a
  joined dictionary, the source word itself is excluded, with or without its subword mark.

Only the words that occur in the split on that side are used, also if both sides share one matrix.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.analysis.figures import pyplot, save_figure, save_table
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.data.subwords import without_marks

SIDES = ("source", "target")
DRAWN = 300  # words of each side in the scatter plot
NEIGHBOURS = 5


def ranked_words(loaded: Loaded) -> list[list[int]]:
    """Return the ids of the split's source and target words, most frequent first, no special symbols."""
    dataset, task = loaded.task.dataset(loaded.split), loaded.task
    ids = []
    for sentences, words in ((dataset.src, task.source_dictionary), (dataset.tgt, task.target_dictionary)):
        counts = Counter(word for i in range(len(dataset)) for word in sentences[i].tolist())
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        ids.append([word for word in ranked if word >= words.nspecial])
    return ids


def embedding_matrices(loaded: Loaded) -> list[Tensor]:
    """Return the source and target embeddings, V x C each, on the CPU in float32."""
    stacks = (loaded.model.encoder, loaded.model.decoder)
    return [stack.embed_tokens.weight.detach().float().cpu() for stack in stacks]


def log_singular_values(embedding: Tensor) -> Tensor:
    """Return ``log(sigma_i / sigma_1)`` of a W x C matrix, decreasing from 0."""
    values = torch.linalg.svdvals(embedding)
    return (values / values[0]).clamp(min=torch.finfo(values.dtype).tiny).log()


def principal_plane(embedding: Tensor) -> Tensor:
    """Return the coordinates (W x 2) of W words on the first two principal components."""
    centred = embedding - embedding.mean(0)
    return centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].t()


def neighbours(
    source: Tensor, target: Tensor, count: int, excluded: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Return the largest cosines to each row of *source* and their rows of *target*, S x count each.

    Args:
        source, target: embeddings, S x C and T x C.
        count: number of neighbours per row; at most T are returned.
        excluded: S x T, True for pairs that are not neighbours; their cosine is -inf.
    """
    cosine = F.normalize(source, dim=1) @ F.normalize(target, dim=1).t()
    if excluded is not None:
        cosine = cosine.masked_fill(excluded, -torch.inf)
    return cosine.topk(min(count, len(target)), dim=1)


def same_words(source: Sequence[str], target: Sequence[str]) -> Tensor:
    """Return S x T, True where the words are equal without subword marks (``\u2581word``, ``word@@``)."""
    sides = [[*map(without_marks, side)] for side in (source, target)]
    ids = {word: i for i, word in enumerate(dict.fromkeys([*sides[0], *sides[1]]))}
    rows, columns = (torch.tensor([ids[word] for word in side]) for side in sides)
    return rows[:, None] == columns


def draw(loaded: Loaded, out: Path, against: Loaded | None = None) -> list[Path]:
    """Write ``singular_values``, ``pca`` (``.csv``, ``.png``, ``.svg``) and ``neighbours.csv`` to *out*."""
    word_ids = ranked_words(loaded)
    dictionaries = (loaded.task.source_dictionary, loaded.task.target_dictionary)
    words = [[names[i] for i in ids] for names, ids in zip(dictionaries, word_ids, strict=True)]
    source, target = (matrix[ids] for matrix, ids in zip(embedding_matrices(loaded), word_ids, strict=True))
    curves = {"source": log_singular_values(source), "target": log_singular_values(target)}
    if against is not None:
        for side, matrix, ids in zip(SIDES, embedding_matrices(against), word_ids, strict=True):
            curves[f"{side}, other model"] = log_singular_values(matrix[ids])
    paths = _draw_singular_values(curves, out)
    paths += _draw_principal_plane([source[:DRAWN], target[:DRAWN]], words, out)
    same = same_words(words[0][:DRAWN], words[1]) if dictionaries[0] == dictionaries[1] else None
    cosines, nearest = neighbours(source[:DRAWN], target, NEIGHBOURS, same)
    rows = [
        (source_word, rank, words[1][i], cosine)
        for source_word, row, ids in zip(words[0], cosines.tolist(), nearest.tolist(), strict=False)
        for rank, (cosine, i) in enumerate(zip(row, ids, strict=True), 1)
        if cosine > -torch.inf
    ]
    return [*paths, save_table(out / "neighbours.csv", ("source", "rank", "target", "cosine"), rows)]


def _draw_singular_values(curves: dict[str, Tensor], out: Path) -> list[Path]:
    rows = [(name, i, value) for name, x in curves.items() for i, value in enumerate(x.tolist(), 1)]
    table = save_table(out / "singular_values.csv", ("matrix", "i", "log_ratio"), rows)
    figure, axes = pyplot().subplots(figsize=(5, 3.4), layout="constrained")
    for name, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve.tolist(), "--" if "other" in name else "-", label=name)
    axes.set(title="singular values of the embeddings", xlabel="singular value")
    axes.set_ylabel("log of its ratio to the first")
    axes.legend()
    return [table, *save_figure(figure, out / "singular_values")]


def _draw_principal_plane(embeddings: list[Tensor], words: list[list[str]], out: Path) -> list[Path]:
    coordinates = principal_plane(torch.cat(embeddings)).split([len(x) for x in embeddings])
    rows = [
        (side, word, *point)
        for side, names, points in zip(SIDES, words, coordinates, strict=True)
        for word, point in zip(names, points.tolist(), strict=False)
    ]
    table = save_table(out / "pca.csv", ("side", "word", "x", "y"), rows)
    figure, axes = pyplot().subplots(figsize=(4.6, 4), layout="constrained")
    for side, points, marker in zip(SIDES, coordinates, ("o", "x"), strict=True):
        axes.scatter(*points.t().tolist(), s=12, marker=marker, label=side, alpha=0.7)
    labels = ("first principal component", "second principal component")
    axes.set(title="the most frequent words", xlabel=labels[0], ylabel=labels[1])
    axes.legend()
    return [table, *save_figure(figure, out / "pca")]
