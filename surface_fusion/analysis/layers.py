"""Weights of the encoder layers in a fusion: figure 1 of SurfaceFusion (Liu et al., ICLR 2021).

The method's ``layer_shares`` computes them; weights that depend on the position are averaged over the data.
"""

import math
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surface_fusion.analysis.figures import heat_map, save_figure, save_table
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.encoder_fusion import EncoderFusion, LayerAttention, methods


class LayerWeights(NamedTuple):
    """Weights of layers (rows, from layer 0 or 1) in the input of others (columns); NaN if not an input."""

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
    """Return the weights of the layers in the model's fusion.

    Raises:
        SurfaceFusionError: the fusion has no layer weights.
    """
    encoder, decoder = loaded.model.encoder, loaded.model.decoder
    fusion = getattr(encoder, "fusion", None) or getattr(encoder, "combination", None)
    if fusion is None or fusion.layer_shares is None:
        weighted = (name for name, method in methods().items() if method.layer_shares is not None)
        raise loaded.inapplicable("weighs layers", weighted, "do")
    first = 1 - bool(loaded.setting("encoder_fusion_embedding"))
    if isinstance(fusion, EncoderFusion):
        return [LayerWeights("layers", _mean_shares(loaded)[:, None], first, "", ["weight"])]
    if isinstance(fusion, LayerAttention):
        values = fusion.layer_shares().t()
        columns = [str(m + 1) for m in range(values.shape[1])]
        return [LayerWeights("layers", values, first, "decoder layer", columns)]
    return [
        LayerWeights(
            f"layers_{name}",
            stack.combination.layer_shares(),
            0,
            f"read by {name} layer",
            [*(str(n + 1) for n in range(stack.combination.layers)), "out"],
        )
        for name, stack in (("encoder", encoder), ("decoder", decoder))
    ]


def _mean_shares(loaded: Loaded) -> Tensor:
    """Return the weights of the N states; if they depend on the position, their mean over source tokens."""
    encoder: Any = loaded.model.encoder
    total, count = torch.zeros(()), 0
    shares: list[Tensor] = []
    with encoder.fusion.register_forward_pre_hook(
        lambda fusion, args: shares.append(fusion.layer_shares(args[0]))
    ):
        for batch in loaded.batches():
            inputs = batch["net_input"]
            encoder(inputs["src_tokens"], inputs["src_lengths"])
            share = shares.pop()
            if share.dim() == 1:
                return share.float().cpu()
            real = inputs["src_tokens"].ne(encoder.padding_idx).t()
            total = total + share[real].double().sum(0).cpu()
            count += int(real.sum())
    return (total / count).float()


def draw(loaded: Loaded, out: Path) -> list[Path]:
    """Write ``layers.csv``, ``.png`` and ``.svg`` to the folder *out*; for dlcl, one set per stack."""
    paths: list[Path] = []
    for table in layer_weights(loaded):
        values = table.values.tolist()
        rows = [
            (layer, column, value)
            for layer, row in zip(table.layers, values, strict=True)
            for column, value in zip(table.columns, row, strict=True)
            if not math.isnan(value)
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
