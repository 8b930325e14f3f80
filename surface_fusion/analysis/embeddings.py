"""Geometry of the source and target embeddings, compared with another model (usually the plain one).

* singular values: ``log(sigma_i / sigma_1)`` of each matrix of the words that occur, i over the width;
  flatter means that the words fill more directions;
* PCA: the most frequent words of each side in the plane of the two main directions;
* neighbours: for the most frequent source words the nearest target words by cosine; with a joined dictionary
  the word itself, with or without its subword mark, is none of them.

Words are those that the split has on that side; with a joint matrix both sides are rows of it.
"""

from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.analysis.figures import pyplot, save_figure, save_table
from surface_fusion.analysis.loaded import Loaded

DRAWN = 300
"""Number of words of each side in the scatter plot."""
NEIGHBOURS = 5


def occurring(loaded: Loaded) -> tuple[list[int], list[int]]:
    """Ids of the words of the split, source and target, the most frequent first; special symbols left out."""
    dataset = loaded.task.dataset(loaded.split)
    found = []
    sides = ((dataset.src, loaded.task.source_dictionary), (dataset.tgt, loaded.task.target_dictionary))
    for sentences, words in sides:
        counts: Counter[int] = Counter()
        for i in range(len(dataset)):
            counts.update(sentences[i].tolist())
        ranked = sorted(counts, key=lambda word: (-counts[word], word))
        found.append([word for word in ranked if word >= words.nspecial])
    return found[0], found[1]


def matrices(loaded: Loaded) -> tuple[Tensor, Tensor]:
    """Both embedding matrices, V x C, on the CPU in float32."""
    model: Any = loaded.model
    source = model.encoder.embed_tokens.weight.detach().float().cpu()
    target = model.decoder.embed_tokens.weight.detach().float().cpu()
    return source, target


def log_singular_values(embedding: Tensor) -> Tensor:
    """``log(sigma_i / sigma_1)`` of W x C, from 0 down."""
    values = torch.linalg.svdvals(embedding)
    return (values / values[0]).clamp(min=torch.finfo(values.dtype).tiny).log()


def principal_plane(embedding: Tensor) -> Tensor:
    """Coordinates of W words on the first two principal components: W x 2."""
    centred = embedding - embedding.mean(0)
    places: Tensor = centred @ torch.linalg.svd(centred, full_matrices=False).Vh[:2].t()
    return places


def neighbours(
    source: Tensor, target: Tensor, count: int, left_out: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """The nearest rows of *target* for each row of *source*, by their cosine.

    Args:
        source: embeddings, S x C.
        target: embeddings, T x C.
        count: how many of each row; T if there are fewer.
        left_out: S x T, True for pairs that do not count; their cosine is -inf.

    Returns:
        Cosines and numbers of rows of *target*, S x count each, the nearest first.
    """
    cosine = F.normalize(source, dim=1) @ F.normalize(target, dim=1).t()
    if left_out is not None:
        cosine = cosine.masked_fill(left_out, -torch.inf)
    return cosine.topk(min(count, len(target)), dim=1)


def same_words(source: Sequence[str], target: Sequence[str]) -> Tensor:
    """S x T, True where both are one word, with or without a subword mark (``\u2581word``, ``word@@``)."""
    sides = [[word.removeprefix("\u2581").removesuffix("@@") for word in side] for side in (source, target)]
    numbers = {word: i for i, word in enumerate(dict.fromkeys([*sides[0], *sides[1]]))}
    rows, columns = (torch.tensor([numbers[word] for word in side]) for side in sides)
    return rows[:, None] == columns


def draw(loaded: Loaded, out: Path, against: Loaded | None = None) -> list[Path]:
    """Write ``singular_values``, ``pca`` (``.csv``, ``.png``, ``.svg``) and ``neighbours.csv`` to *out*."""
    words = occurring(loaded)
    names = (loaded.task.source_dictionary, loaded.task.target_dictionary)
    own = [matrix[ids] for matrix, ids in zip(matrices(loaded), words, strict=True)]
    curves = {f"{side}": log_singular_values(x) for side, x in zip(("source", "target"), own, strict=True)}
    if against is not None:
        for side, matrix, ids in zip(("source", "target"), matrices(against), words, strict=True):
            curves[f"{side}, other model"] = log_singular_values(matrix[ids])
    rows: list[tuple[object, ...]] = [
        (name, i + 1, f"{value:.6g}") for name, x in curves.items() for i, value in enumerate(x.tolist())
    ]
    paths = [save_table(out / "singular_values.csv", ("matrix", "i", "log_ratio"), rows)]
    figure, axes = pyplot().subplots(figsize=(5, 3.4), layout="constrained")
    for name, curve in curves.items():
        axes.plot(range(1, len(curve) + 1), curve.tolist(), "--" if "other" in name else "-", label=name)
    axes.set_title("singular values of the embeddings")
    axes.set_xlabel("singular value")
    axes.set_ylabel("log of its share of the first")
    axes.legend()
    paths += save_figure(figure, out / "singular_values")

    drawn = [x[:DRAWN] for x in own]
    places = principal_plane(torch.cat(drawn)).split([len(x) for x in drawn])
    rows = [
        (side, dictionary[word], f"{x:.6g}", f"{y:.6g}")
        for side, dictionary, ids, place in zip(("source", "target"), names, words, places, strict=True)
        for word, (x, y) in zip(ids, place.tolist(), strict=False)
    ]
    paths.append(save_table(out / "pca.csv", ("side", "word", "x", "y"), rows))
    figure, axes = pyplot().subplots(figsize=(4.6, 4), layout="constrained")
    for side, place, mark in zip(("source", "target"), places, ("o", "x"), strict=True):
        axes.scatter(*place.t().tolist(), s=12, marker=mark, label=side, alpha=0.7)
    axes.set_title("the most frequent words")
    axes.set_xlabel("first principal direction")
    axes.set_ylabel("second")
    axes.legend()
    paths += save_figure(figure, out / "pca")

    source_words, target_words = ([names[side][i] for i in words[side]] for side in (0, 1))
    itself = same_words(source_words[:DRAWN], target_words) if names[0] == names[1] else None
    cosines, nearest = neighbours(drawn[0], own[1], NEIGHBOURS, itself)
    rows = [
        (word, rank, target_words[other], f"{cosine:.6g}")
        for word, row, others in zip(source_words, cosines.tolist(), nearest.tolist(), strict=False)
        for rank, (cosine, other) in enumerate(zip(row, others, strict=True), 1)
        if cosine > -torch.inf
    ]
    paths.append(save_table(out / "neighbours.csv", ("source", "rank", "target", "cosine"), rows))
    return paths
