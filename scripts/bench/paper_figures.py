"""Figures 1 and 2 of SurfaceFusion (Liu et al., 2021) for our models, next to the paper's values.

    python scripts/bench/paper_figures.py DATA-BIN CHECKPOINT [CHECKPOINT ...] -o DIR
    python scripts/bench/paper_figures.py --redraw -o DIR            from the CSVs in DIR

Each CHECKPOINT is one seed of a training with ``--encoder-fusion fine-grained --encoder-fusion-embedding``.
Figure 1 shows the mean weight of each encoder layer in the input of each decoder layer. Figure 2 shows the
change of BLEU if one encoder layer has no weight during decoding. The script writes ``figure1`` and
``figure2`` as CSV, PNG and SVG, with means over the seeds.

It also prints whether the paper's claim holds, that the uppermost decoder layer leans on the embedding layer
more than lower ones do. It holds here if the embedding layer has the largest weight in the uppermost decoder
layer and not in the lowest, and a smaller weight in the lowest.
"""

import argparse
import csv
import math
import statistics
from pathlib import Path
from typing import Any

import torch
from results import positive

import surface_fusion  # noqa: F401  (registers the models)
from surface_fusion.analysis.ablation import ablate, percent_change
from surface_fusion.analysis.figures import pyplot, save_figure, save_table
from surface_fusion.analysis.layers import layer_weights
from surface_fusion.analysis.loaded import Loaded, load
from surface_fusion.data.subwords import subword_marks
from surface_fusion.encoder_fusion import LayerAttention
from surface_fusion.errors import SurfaceFusionError

LAYERS = ("Emb", "1", "2", "3", "4", "5", "6")
FIGURE_1 = (
    (0.13, 0.11, 0.13, 0.15, 0.17, 0.19),
    (0.14, 0.11, 0.11, 0.13, 0.14, 0.16),
    (0.14, 0.12, 0.12, 0.13, 0.14, 0.15),
    (0.15, 0.14, 0.14, 0.13, 0.14, 0.14),
    (0.14, 0.15, 0.15, 0.15, 0.14, 0.13),
    (0.16, 0.18, 0.17, 0.16, 0.14, 0.13),
    (0.15, 0.18, 0.17, 0.15, 0.12, 0.11),
)
"""The paper's values, Romanian-English: a row for each of ``LAYERS``, a column for each decoder layer."""
FIGURE_2 = (-3.4, -1.4, -0.7, -0.3, -0.2, 0.0, -1.7)
"""The paper's values, Romanian-English: relative change of BLEU in %, read off the figure."""


def load_fine_grained(path: str, args: argparse.Namespace) -> Loaded:
    """Load the model at *path*.

    Raises:
        SurfaceFusionError: it has no fine-grained fusion with the embedding layer.
    """
    loaded = load(path, args.data, args.split, args.cpu)
    fusion = getattr(loaded.model.encoder, "fusion", None)
    if not isinstance(fusion, LayerAttention) or not fusion.embeds:
        raise SurfaceFusionError(
            f"{path} was not trained with --encoder-fusion fine-grained --encoder-fusion-embedding"
        )
    return loaded


def measure_figure_1(models: list[Loaded], out: Path) -> None:
    """Write ``figure1.csv``.

    Raises:
        SurfaceFusionError: the models have different layers.
    """
    tables = [layer_weights(loaded)[0].values.detach().float().cpu() for loaded in models]
    if len({table.shape for table in tables}) > 1:
        raise SurfaceFusionError(
            "the checkpoints have different numbers of layers; give seeds of one training"
        )
    weights = torch.stack(tables)
    mean, deviation = weights.mean(0), weights.std(0, unbiased=len(models) > 1)
    rows = [
        (layer, column + 1, f"{mean[i, column]:.4f}", f"{deviation[i, column]:.4f}", _paper_value(i, column))
        for i, layer in enumerate(_layers(len(mean)))
        for column in range(mean.shape[1])
    ]
    columns = ("encoder_layer", "decoder_layer", "mean", "deviation", "paper", "seeds")
    save_table(out / "figure1.csv", columns, [(*row, len(models)) for row in rows])


def draw_figure_1(out: Path) -> str:
    """Draw ``figure1.csv``; return a sentence on the paper's claim."""
    rows = _rows(out / "figure1.csv")
    mean = _by_layer(rows, "mean")
    figure, axes = pyplot().subplots(1, 2, figsize=(8.6, 3.4), layout="constrained")
    for ax, title, values in (
        (axes[0], f"ours, {rows[0]['seeds']} seed(s)", mean),
        (axes[1], "paper (Ro-En)", FIGURE_1),
    ):
        image = _draw_weights(ax, title, values)
    figure.colorbar(image, ax=axes, label="weight")
    save_figure(figure, out / "figure1")
    return claim(mean, _by_layer(rows, "deviation"))


def claim(mean: list[list[float]], deviation: list[list[float]]) -> str:
    """State whether the uppermost decoder layer leans on the embedding layer more than lower ones do.

    Args:
        mean: weights; rows: encoder layers from the embedding layer up, columns: decoder layers.
        deviation: their standard deviation over the seeds.

    Returns:
        A sentence with the weights.
    """
    names = _layers(len(mean))
    largest = [names[max(range(len(names)), key=lambda i: column[i])] for column in zip(*mean, strict=True)]
    ends = [
        f"{where} decoder layer gives the embedding layer {mean[0][i]:.3f} ± {deviation[0][i]:.3f} of its "
        f"weight (paper: {FIGURE_1[0][i]:.2f}) and most to layer {largest[i]} (paper: {most})"
        for where, i, most in (("the lowest", 0, "5"), ("the uppermost", -1, "Emb"))
    ]
    embedding_first = [str(i) for i, name in enumerate(largest, 1) if name == "Emb"]
    holds = largest[-1] == "Emb" != largest[0] and mean[0][-1] > mean[0][0]
    return (
        f"{'; '.join(ends)}. The embedding layer has the largest weight in decoder layers "
        f"{', '.join(embedding_first) or 'none'} of {len(largest)} (paper: 5, 6 of 6): the paper's claim, "
        "that the uppermost leans on it more than lower ones do, "
        f"{'holds' if holds else 'does not hold'} here"
    )


def measure_figure_2(models: list[Loaded], out: Path, beam: int) -> None:
    """Write ``figure2.csv``."""
    bleu: list[list[float]] = []
    length: list[list[float]] = []
    signature = ""
    for loaded in models:
        full, *ablations = ablate(loaded, beam, subword_marks(loaded.task.target_dictionary))
        signature = full.bleu.signature
        bleu.append([percent_change(row.bleu.value, full.bleu.value) for row in ablations])
        length.append([percent_change(row.tokens, full.tokens) for row in ablations])
    layers = _layers(len(bleu[0]))
    rows = []
    for i, (layer, *changes) in enumerate(
        zip(layers, zip(*bleu, strict=True), zip(*length, strict=True), strict=True)
    ):
        moments = [f"{x:.2f}" for seeds in changes for x in _moments(seeds)]
        paper = str(FIGURE_2[i]) if len(layers) == len(LAYERS) else ""
        rows.append((layer, *moments, paper, signature, len(models)))
    columns = ("silenced", "bleu_change", "bleu_deviation", "length_change", "length_deviation")
    save_table(out / "figure2.csv", (*columns, "paper_bleu_change", "signature", "seeds"), rows)


def draw_figure_2(out: Path) -> str:
    """Draw ``figure2.csv``; return a sentence on the largest loss."""
    rows = _rows(out / "figure2.csv")
    layers = [row["silenced"] for row in rows]
    means, deviations = ([float(row[f"bleu_{name}"]) for row in rows] for name in ("change", "deviation"))
    figure, ax = pyplot().subplots(figsize=(6, 3.2), layout="constrained")
    label = f"ours, {rows[0]['seeds']} seed(s)"
    ax.bar([i - 0.2 for i in range(len(rows))], means, 0.4, yerr=deviations, label=label)
    if all(row["paper_bleu_change"] for row in rows):
        paper = [float(row["paper_bleu_change"]) for row in rows]
        label = "paper (Ro-En, read off its figure)"
        ax.bar([i + 0.2 for i in range(len(rows))], paper, 0.4, label=label)
    ax.set_xticks(range(len(layers)), layers)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xlabel("encoder layer without weight")
    ax.set_ylabel("BLEU, % change")
    ax.legend()
    save_figure(figure, out / "figure2")
    worst = min(range(len(layers)), key=lambda i: means[i])
    return (
        f"BLEU loses most without layer {layers[worst]}: {means[worst]:.2f} ± {deviations[worst]:.2f} % "
        "(paper: Emb, -3.4 %)"
    )


def _rows(path: Path) -> list[dict[str, str]]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            rows = [*csv.DictReader(file)]
    except FileNotFoundError:
        raise SurfaceFusionError(f"{path} does not exist; leave out --redraw to create it") from None
    if not rows or "seeds" not in rows[0]:
        raise SurfaceFusionError(f"{path} has no column seeds; leave out --redraw to create it again")
    return rows


def _by_layer(rows: list[dict[str, str]], column: str) -> list[list[float]]:
    names = dict.fromkeys(row["encoder_layer"] for row in rows)
    return [[float(row[column]) for row in rows if row["encoder_layer"] == name] for name in names]


def _layers(count: int) -> tuple[str, ...]:
    return ("Emb", *(str(i) for i in range(1, count)))


def _paper_value(row: int, column: int) -> object:
    in_figure = row < len(FIGURE_1) and column < len(FIGURE_1[0])
    return FIGURE_1[row][column] if in_figure else ""


def _draw_weights(ax: Any, title: str, values: Any) -> Any:
    image = ax.imshow(values, origin="lower", aspect="auto", cmap="Blues", vmin=0.08, vmax=0.22)
    ax.set_xticks(range(len(values[0])), [str(i + 1) for i in range(len(values[0]))])
    ax.set_yticks(range(len(values)), _layers(len(values)))
    ax.set_xlabel("decoder layer")
    ax.set_ylabel("encoder layer")
    ax.set_title(title)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            colour = "white" if value > 0.15 else "black"
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)
    return image


def _moments(values: Any) -> tuple[float, float]:
    if not all(map(math.isfinite, values)):  # the full model has BLEU 0; stdev does not accept NaN
        return math.nan, math.nan
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", nargs="?", metavar="DATA-BIN")
    parser.add_argument("checkpoints", nargs="*", metavar="CHECKPOINT")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--split", default="test", help="split to translate for figure 2; default: test")
    parser.add_argument("--beam", type=positive, default=4, metavar="N", help="beam size; default: 4")
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if a GPU is available")
    parser.add_argument("--redraw", action="store_true", help="draw the CSVs in DIR, without a model")
    args = parser.parse_args()
    if {bool(args.data), bool(args.checkpoints)} != {not args.redraw}:
        parser.error("give DATA-BIN and CHECKPOINTs, or --redraw alone")
    try:
        models = [load_fine_grained(path, args) for path in args.checkpoints]
        with torch.no_grad():
            if models:
                measure_figure_1(models, args.out)
            print(draw_figure_1(args.out))
            if models:
                measure_figure_2(models, args.out, args.beam)
            print(draw_figure_2(args.out))
    except (SurfaceFusionError, OSError) as error:
        raise SystemExit(str(error)) from None
    except (ValueError, KeyError) as error:
        if not args.redraw:
            raise
        raise SystemExit(f"a CSV in {args.out} is damaged ({error}); leave out --redraw") from None


if __name__ == "__main__":
    main()
