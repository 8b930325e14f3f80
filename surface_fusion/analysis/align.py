"""Attention of each target token of a sentence pair to the source: surface attention and decoder attention.

Weights over source tokens sum to 1 and are averaged over heads; the decoder's are those of its last layer.
"""

from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surface_fusion.analysis.figures import heat_map, save_figure, save_table
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.errors import SurfaceFusionError


class Alignment(NamedTuple):
    """Weights T x S of one attention, with the words of both sides."""

    name: str
    weights: Tensor
    source: list[str]
    target: list[str]


@torch.no_grad()
def align(loaded: Loaded, sentence: int) -> list[Alignment]:
    """The attentions of sentence number *sentence* (from 0) of the split, with its reference as the target.

    Raises:
        SurfaceFusionError: there is no such sentence.
    """
    dataset = loaded.task.dataset(loaded.split)
    if not 0 <= sentence < len(dataset):
        raise SurfaceFusionError(
            f"--sentence {sentence}: the {loaded.split} set has sentences 0 to {len(dataset) - 1}"
        )
    device = next(loaded.model.parameters()).device
    inputs = dataset.collater([dataset[sentence]])
    target = inputs["target"][0]
    net = {name: x.to(device) for name, x in inputs["net_input"].items() if isinstance(x, Tensor)}
    decoder: Any = loaded.model.decoder
    found: list[Alignment] = []
    surface: Any = getattr(decoder, "sf_attn", None)
    calls: list[Any] = []
    hook = surface.register_forward_pre_hook(lambda _, args: calls.append(args)) if surface else None
    try:
        extra = loaded.model(**net)[1]
    finally:
        if hook is not None:
            hook.remove()
    source = [loaded.task.source_dictionary[i] for i in net["src_tokens"][0].tolist()]
    words = [loaded.task.target_dictionary[i] for i in target.tolist()]
    for query, key, _, mask, *_ in calls:
        weights = surface.weights(query, key, mask)[0].mean(0)
        found.append(Alignment("surface", weights.cpu(), source, words))
    own = extra["attn"][0]
    if own is not None:
        found.append(Alignment("decoder", own[0].float().cpu(), source, words))
    return found


def draw(loaded: Loaded, out: Path, sentence: int) -> list[Path]:
    """Write ``align_surface`` and ``align_decoder`` (``.csv``, ``.png``, ``.svg``) to the folder *out*."""
    return save(align(loaded, sentence), out)


def save(found: list[Alignment], out: Path) -> list[Path]:
    """The files of :func:`draw`, of the attentions *found*."""
    paths: list[Path] = []
    for name, weights, source, target in found:
        values = weights.tolist()
        rows = [
            (i, word, j, other, f"{values[i][j]:.6g}")
            for i, word in enumerate(target)
            for j, other in enumerate(source)
        ]
        columns = ("target_position", "target", "source_position", "source", "weight")
        paths.append(save_table(out / f"align_{name}.csv", columns, rows))
        figure = heat_map(
            values[::-1],  # the first word on top
            rows=target[::-1],
            columns=source,
            row_label="target",
            column_label="source",
            title=f"{name} attention",
            numbers=False,
        )
        paths += save_figure(figure, out / f"align_{name}")
    return paths
