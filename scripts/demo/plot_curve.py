"""Draw the learning curve of one or more trainings from fairseq's JSON logs.

    python plot_curve.py LOG [LOG ...] -o CURVE.png

LOG is the output of ``fairseq-train --log-format json`` or ``fairseq-hydra-train``; a resumed training
appends to it.
"""

import argparse
import json
from pathlib import Path

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt

from surface_fusion.io.atomic_write import atomic_write


def read(log: Path, subset: str) -> list[tuple[int, float]]:
    """Return pairs of update and loss in bits per token of *subset* (``train`` or ``valid``).

    If the log has a normalised loss, that is used. If an update occurs twice, the later line is used. The
    averages of an epoch (``train_...``) are ignored, and so is a line that was cut when its training was
    killed.
    """
    prefix = "valid_" if subset == "valid" else ""
    curve = {}
    for line in log.read_text(encoding="utf-8", errors="replace").split("\n"):
        start = line.rfind('{"epoch": ')
        try:
            stats = json.loads(line[start:]) if start >= 0 else {}
        except json.JSONDecodeError:
            continue
        if f"{prefix}nll_loss" in stats and f"{prefix}num_updates" in stats:
            loss = stats.get(f"{prefix}normalized_nll_loss", stats[f"{prefix}nll_loss"])
            curve[int(stats[f"{prefix}num_updates"])] = float(loss)
    return sorted(curve.items())


def draw(logs: list[Path], out: Path) -> None:
    """Write the figure to *out*, a PNG or SVG file by its name."""
    figure, axes = plt.subplots(figsize=(7, 4.2), layout="constrained")
    names = []
    for i, log in enumerate(logs):
        name = f"{log.parent.name}: " if len(logs) > 1 else ""
        for subset, label, style in (("train", "training", ":"), ("valid", "validation", "o-")):
            points = read(log, subset)
            if not points:
                raise SystemExit(f"{log} has no {label} losses; was it written with --log-format json?")
            axes.plot(*zip(*points, strict=True), style, color=f"C{i}", markersize=4, label=label)
            names.append(name + label)  # set below: matplotlib hides labels that begin with an underscore
    axes.set_xlabel("updates")
    axes.set_ylabel("negative log-likelihood (bits per token)")
    axes.set_title("Learning curve")
    axes.grid(alpha=0.3)
    legend = axes.legend()
    for text, name in zip(legend.get_texts(), names, strict=True):
        text.set_text(name)
        text.set_parse_math(False)
    with atomic_write(out) as file:
        figure.savefig(file, format=out.suffix[1:], dpi=120)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("logs", nargs="+", type=Path)
    parser.add_argument("-o", "--out", type=Path, required=True)
    args = parser.parse_args()
    draw(args.logs, args.out)


if __name__ == "__main__":
    main()
