"""Figures 1 and 2 of SurfaceFusion (Liu et al., 2021), from our own models, beside the paper's values.

    python scripts/bench/paper_figures.py DATA-BIN CHECKPOINT [CHECKPOINT ...] -o DIR

Each CHECKPOINT is one seed of a training with ``--encoder-fusion fine-grained --encoder-fusion-embedding``.
Figure 1 is the mean weight that each decoder layer gives to each encoder layer; figure 2 what BLEU loses when
one encoder layer gets no weight at decode time. Written are ``figure1`` and ``figure2`` as CSV, PNG and SVG,
means over the seeds; and said is whether the paper's claim holds, that the uppermost decoder layer leans on
the embedding layer.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

import torch
from results import positive

import surface_fusion  # noqa: F401  (registers the models)
from surface_fusion.analysis.ablation import ablate, subword_marks
from surface_fusion.analysis.figures import pyplot, save_figure, save_table
from surface_fusion.analysis.layers import layer_weights
from surface_fusion.analysis.loaded import Loaded, load
from surface_fusion.encoder_fusion.transparent import LayerAttention
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
"""The paper's, Romanian-English: a row for each of ``LAYERS``, a column for each decoder layer."""
FIGURE_2 = (-3.4, -1.4, -0.7, -0.3, -0.2, 0.0, -1.7)
"""The paper's, Romanian-English: relative change of BLEU in %, read off the figure."""


def load_fine_grained(path: str, args: argparse.Namespace) -> Loaded:
    """The model at *path*, if the figures can be drawn from it.

    Raises:
        SurfaceFusionError: they cannot.
    """
    loaded = load(path, args.data, args.split, args.cpu)
    fusion = getattr(loaded.model.encoder, "fusion", None)
    if not isinstance(fusion, LayerAttention) or not fusion.embeds:
        raise SurfaceFusionError(
            f"{path} was not trained with --encoder-fusion fine-grained --encoder-fusion-embedding"
        )
    return loaded


def figure_1(models: list[Loaded], out: Path) -> str:
    """Write figure 1; whether the paper's claim holds, as a sentence."""
    tables = [layer_weights(loaded)[0].values.detach().float().cpu() for loaded in models]
    if len({table.shape for table in tables}) > 1:
        raise SurfaceFusionError(
            "the checkpoints differ in their numbers of layers; give one training's seeds"
        )
    found = torch.stack(tables)
    mean, deviation = found.mean(0), found.std(0, unbiased=len(models) > 1)
    rows = [
        (layer, column + 1, f"{mean[i, column]:.4f}", f"{deviation[i, column]:.4f}", *_paper(i, column))
        for i, layer in enumerate(_layers(len(mean)))
        for column in range(mean.shape[1])
    ]
    columns = ("encoder_layer", "decoder_layer", "mean", "deviation", "paper")
    save_table(out / "figure1.csv", columns, rows)
    plt = pyplot()
    figure, axes = plt.subplots(1, 2, figsize=(8, 3.4), layout="constrained")
    for ax, title, values in (
        (axes[0], f"ours, {len(models)} seed(s)", mean.tolist()),
        (axes[1], "paper (Ro-En)", FIGURE_1),
    ):
        _weights(ax, title, values)
    save_figure(figure, out / "figure1")
    top, bottom = found[:, 0, -1].tolist(), found[:, 0, 0].tolist()
    largest = int(mean[:, -1].argmax())
    holds = largest == 0 and statistics.mean(top) > statistics.mean(bottom)
    return (
        f"the uppermost decoder layer gives the embedding layer {_spread(top)} of its weight, the lowest "
        f"{_spread(bottom)} (paper: 0.19, 0.13), and most to layer {_layers(len(mean))[largest]}: the "
        f"paper's claim {'holds' if holds else 'does not hold'} here"
    )


def figure_2(models: list[Loaded], out: Path, beam: int) -> str:
    """Write figure 2; the largest loss, as a sentence."""
    bleu: list[list[float]] = []
    length: list[list[float]] = []
    signature = ""
    for loaded in models:
        whole, *layers = ablate(loaded, beam, subword_marks(loaded.task.target_dictionary))
        signature = whole.bleu.signature
        bleu.append([_change(layer.bleu.value, whole.bleu.value) for layer in layers])
        length.append([_change(layer.tokens, whole.tokens) for layer in layers])
    layers = _layers(len(bleu[0]))
    losses, lengths = [*zip(*bleu, strict=True)], [*zip(*length, strict=True)]
    rows = [
        (
            *(layer, *(f"{x:.2f}" for x in _moments(losses[i])), *(f"{x:.2f}" for x in _moments(lengths[i]))),
            *((FIGURE_2[i] if len(layers) == len(LAYERS) else ""), signature),
        )
        for i, layer in enumerate(layers)
    ]
    columns = ("silenced", "bleu_change", "bleu_deviation", "length_change", "length_deviation")
    save_table(out / "figure2.csv", (*columns, "paper_bleu_change", "signature"), rows)
    figure, ax = pyplot().subplots(figsize=(6, 3.2), layout="constrained")
    places = torch.arange(len(layers))
    means, deviations = zip(*map(_moments, losses), strict=True)
    ax.bar((places - 0.2).tolist(), means, 0.4, yerr=deviations, label=f"ours, {len(models)} seed(s)")
    if len(layers) == len(LAYERS):
        ax.bar((places + 0.2).tolist(), FIGURE_2, 0.4, label="paper (Ro-En, read off)")
    ax.set_xticks(places.tolist(), layers)
    ax.axhline(0, color="black", linewidth=0.8)
    ax.set_xlabel("encoder layer without weight")
    ax.set_ylabel("BLEU, % change")
    ax.legend()
    save_figure(figure, out / "figure2")
    worst = min(range(len(layers)), key=lambda i: means[i])
    return f"BLEU loses most without layer {layers[worst]}: {_spread(losses[worst])} % (paper: Emb, -3.4 %)"


def _layers(count: int) -> tuple[str, ...]:
    return ("Emb", *(str(i) for i in range(1, count)))


def _paper(row: int, column: int) -> tuple[object]:
    inside = row < len(FIGURE_1) and column < len(FIGURE_1[0])
    return (FIGURE_1[row][column] if inside else "",)


def _weights(ax: Any, title: str, values: Any) -> None:
    ax.imshow(values, origin="lower", aspect="auto", cmap="Blues", vmin=0.08, vmax=0.22)
    ax.set_xticks(range(len(values[0])), [str(i + 1) for i in range(len(values[0]))])
    ax.set_yticks(range(len(values)), _layers(len(values)))
    ax.set_xlabel("decoder layer")
    ax.set_ylabel("encoder layer")
    ax.set_title(title)
    for i, row in enumerate(values):
        for j, value in enumerate(row):
            colour = "white" if value > 0.15 else "black"
            ax.text(j, i, f"{value:.2f}", ha="center", va="center", color=colour, fontsize=8)


def _change(value: float, base: float) -> float:
    return 100 * (value / base - 1) if base else 0.0


def _moments(values: Any) -> tuple[float, float]:
    return statistics.mean(values), statistics.stdev(values) if len(values) > 1 else 0.0


def _spread(values: Any) -> str:
    return "{:.3f} ± {:.3f}".format(*_moments(values))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", metavar="DATA-BIN")
    parser.add_argument("checkpoints", nargs="+", metavar="CHECKPOINT")
    parser.add_argument("-o", "--out", type=Path, required=True, metavar="DIR")
    parser.add_argument("--split", default="test", help="that figure 2 translates; default: test")
    parser.add_argument("--beam", type=positive, default=4, metavar="N")
    parser.add_argument("--cpu", action="store_true", help="although there is a GPU")
    args = parser.parse_args()
    try:
        models = [load_fine_grained(path, args) for path in args.checkpoints]
        with torch.no_grad():
            print(figure_1(models, args.out))
            print(figure_2(models, args.out, args.beam))
    except (SurfaceFusionError, OSError) as error:
        raise SystemExit(str(error)) from None


if __name__ == "__main__":
    main()
