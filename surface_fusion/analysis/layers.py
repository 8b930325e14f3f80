"""Weights of the encoder layers in a fusion: figure 1 of SurfaceFusion (Liu et al., ICLR 2021).

* transparent, fine-grained: the weights w^{m,n} of decoder layer m, over channels the mean, as in the figure;
* dlcl: the rows W^{l+1} of encoder and decoder;
* dwatt: the weights of the layers, over the positions of the data the mean;
* representation: the weights w_n likewise;
* concat, routing: the share of ||W_n|| (Frobenius) in the sum over n;
* average: 1/N.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surface_fusion.analysis.figures import heat_map, save_figure, save_table
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.encoder_fusion.average import Average
from surface_fusion.encoder_fusion.concat import Concat
from surface_fusion.encoder_fusion.dlcl import DLCL
from surface_fusion.encoder_fusion.dwatt import DWAtt
from surface_fusion.encoder_fusion.representation import Representation
from surface_fusion.encoder_fusion.routing import Routing
from surface_fusion.encoder_fusion.transparent import LayerAttention
from surface_fusion.errors import SurfaceFusionError


class LayerWeights(NamedTuple):
    """Weights of layers (rows, from layer 0 or 1) by the layer that reads them (columns), or NaN."""

    name: str
    values: Tensor
    first_layer: int
    column_label: str
    columns: list[str]

    @property
    def layers(self) -> list[str]:
        """Names of the rows."""
        last = self.first_layer + len(self.values)
        return ["Emb" if n == 0 else str(n) for n in range(self.first_layer, last)]


@torch.no_grad()
def layer_weights(loaded: Loaded) -> list[LayerWeights]:
    """Weights of the layers in the model's fusion.

    Raises:
        SurfaceFusionError: the fusion has no layer weights.
    """
    encoder, decoder = loaded.model.encoder, loaded.model.decoder
    fusion = getattr(encoder, "fusion", None)
    if isinstance(fusion, LayerAttention):
        weight = fusion.layer_weights()
        by_layer = (weight.mean(-1) if weight.dim() == 3 else weight).t()
        columns = [str(m + 1) for m in range(by_layer.shape[1])]
        return [LayerWeights("layers", by_layer, 1 - fusion.embeds, "decoder layer", columns)]
    if isinstance(getattr(encoder, "combination", None), DLCL):
        return [
            _dlcl(stack.combination, name) for name, stack in (("encoder", encoder), ("decoder", decoder))
        ]
    if isinstance(fusion, Average):
        shares = torch.full((fusion.states,), 1 / fusion.states)
    elif isinstance(fusion, (Concat, Routing)):
        weight = fusion.weight if isinstance(fusion, Concat) else fusion.votes
        norms = weight.flatten(1).norm(dim=1)
        shares = norms / norms.sum()
    elif isinstance(fusion, DWAtt):
        shares = _mean_over_positions(loaded, lambda states: fusion.weights(states[-1]))
    elif isinstance(fusion, Representation):
        shares = _mean_over_positions(loaded, lambda states: torch.cat([*map(fusion.weigh, states)], -1))
    else:
        method = loaded.setting("encoder_fusion")
        raise SurfaceFusionError(
            ("the model has no --encoder-fusion" if method is None else f"--encoder-fusion {method} is none")
            + " that weighs layers; transparent, fine-grained, dlcl, dwatt, representation, concat, routing "
            "and average do"
        )
    first = 1 - bool(loaded.setting("encoder_fusion_embedding"))
    return [LayerWeights("layers", shares[:, None], first, "", ["weight"])]


def _dlcl(combination: DLCL, stack: str) -> LayerWeights:
    size = combination.layers + 1
    values = torch.full((size, size), float("nan"))
    for depth, read in enumerate(combination.sizes):
        values[depth + 1 - read : depth + 1, depth] = combination.row(depth)
    columns = [*(str(n) for n in range(1, size)), "out"]
    return LayerWeights(f"layers_{stack}", values, 0, f"read by {stack} layer", columns)


def _mean_over_positions(loaded: Loaded, weigh: Callable[[list[Tensor]], Tensor]) -> Tensor:
    """Of *weigh*, states to S x B x N, over all source tokens of the data: N."""
    encoder: Any = loaded.model.encoder
    total, count = torch.zeros(()), 0
    found: list[Tensor] = []
    hook = encoder.fusion.register_forward_pre_hook(lambda _, args: found.append(weigh(args[0])))
    try:
        for batch in loaded.batches():
            inputs = batch["net_input"]
            encoder(inputs["src_tokens"], inputs["src_lengths"])
            real = inputs["src_tokens"].ne(encoder.padding_idx).t()
            total = total + found.pop()[real].double().sum(0).cpu()
            count += int(real.sum())
    finally:
        hook.remove()
    return (total / count).float()


def draw(loaded: Loaded, out: Path) -> list[Path]:
    """Write ``layers.csv``, ``.png`` and ``.svg`` to the folder *out* (dlcl: of each stack)."""
    paths: list[Path] = []
    for table in layer_weights(loaded):
        values = table.values.tolist()
        rows = [
            (layer, column, f"{value:.6g}")
            for layer, row in zip(table.layers, values, strict=True)
            for column, value in zip(table.columns, row, strict=True)
            if value == value
        ]
        paths.append(save_table(out / f"{table.name}.csv", ("layer", "read_by", "weight"), rows))
        figure = heat_map(
            values,
            rows=table.layers,
            columns=table.columns,
            row_label="layer",
            column_label=table.column_label,
            title="weights of layers",
        )
        paths += save_figure(figure, out / table.name)
    return paths
