"""Attention of each target token of a sentence pair to the source.

There are two: the surface attention, and the cross attention of the last decoder layer; mean over heads.
"""

from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surface_fusion.analysis.figures import heat_map, save_figure, save_table
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.errors import SurfaceFusionError


class Alignment(NamedTuple):
    """An attention, ``surface`` or ``decoder``: *weights*, T x S, of T target to S source tokens."""

    name: str
    weights: Tensor
    source: list[str]
    target: list[str]


@torch.no_grad()
def align(loaded: Loaded, sentence: int) -> list[Alignment]:
    """Compute the attentions of sentence *sentence* (from 0) of the split, with its reference as the target.

    Raises:
        SurfaceFusionError: *sentence* is out of range.
    """
    dataset = loaded.task.dataset(loaded.split)
    if not 0 <= sentence < len(dataset):
        raise SurfaceFusionError(
            f"--sentence {sentence}: give 0 to {len(dataset) - 1}, the sentences of the {loaded.split} set"
        )
    device = next(loaded.model.parameters()).device
    inputs = dataset.collater([dataset[sentence]])
    net = {name: x.to(device) for name, x in inputs["net_input"].items() if isinstance(x, Tensor)}
    surface: Any = getattr(loaded.model.decoder, "sf_attn", None)
    calls: list[Any] = []
    with surface.register_forward_pre_hook(lambda _, args: calls.append(args)) if surface else nullcontext():
        cross_attention = loaded.model(**net)[1]["attn"][0]
    attentions = [
        ("surface", surface.weights(query, key, mask)[0].mean(0)) for query, key, _, mask, *_ in calls
    ]
    if cross_attention is not None:
        attentions.append(("decoder", cross_attention[0].float()))
    source = [loaded.task.source_dictionary[i] for i in net["src_tokens"][0].tolist()]
    target = [loaded.task.target_dictionary[i] for i in inputs["target"][0].tolist()]
    return [Alignment(name, weights.cpu(), source, target) for name, weights in attentions]


def draw(loaded: Loaded, out: Path, sentence: int) -> list[Path]:
    """Write ``align_surface`` and ``align_decoder`` (``.csv``, ``.png``, ``.svg``) to the folder *out*."""
    return save(align(loaded, sentence), out)


def save(alignments: list[Alignment], out: Path) -> list[Path]:
    """Write the table and the heat map of each of *alignments* to the folder *out*."""
    paths: list[Path] = []
    for name, weights, source, target in alignments:
        values = weights.tolist()
        rows = [
            (i, target_word, j, source_word, values[i][j])
            for i, target_word in enumerate(target)
            for j, source_word in enumerate(source)
        ]
        columns = ("target_position", "target", "source_position", "source", "weight")
        paths.append(save_table(out / f"align_{name}.csv", columns, rows))
        figure = heat_map(
            values[::-1],  # the first word at the top
            rows=target[::-1],
            columns=source,
            row_label="target",
            column_label="source",
            title=f"{name} attention",
            numbers=False,
        )
        paths += save_figure(figure, out / f"align_{name}")
    return paths
