"""Measure BLEU without one encoder layer in the fusion: figure 2 of SurfaceFusion (Liu et al., 2021).

In decoding, the weight of one layer in the fusion is zero. The encoder still runs all layers, and the other
weights do not change.
"""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from omegaconf import OmegaConf
from tqdm import tqdm

from surface_fusion.analysis.figures import pyplot, save_figure, save_table
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.data.subwords import subword_marks
from surface_fusion.encoder_fusion import LayerAttention, methods
from surface_fusion.scoring import Score, score_text


class Ablation(NamedTuple):
    """One row of the table; *layer* is ``none`` for the full model, *tokens* include ``</s>``."""

    layer: str
    bleu: Score
    tokens: int


@contextlib.contextmanager
def silenced(fusion: Any, state: int) -> Iterator[None]:
    """Set the weight of state number *state* (from 0) in *fusion* to zero inside the block."""
    if isinstance(fusion, LayerAttention):
        fusion.silenced.append(state)
        try:
            yield
        finally:
            fusion.silenced.remove(state)
    else:
        with fusion.register_forward_pre_hook(
            lambda _, args: ([torch.zeros_like(x) if n == state else x for n, x in enumerate(args[0])],)
        ):
            yield


def translate(loaded: Loaded, beam: int, post_process: str | None) -> tuple[Score, int]:
    """Translate the split by beam search with length penalty 1; return BLEU and the number of tokens."""
    generation = {"beam": beam, "lenpen": 1.0, "max_len_a": 1.2, "max_len_b": 10}
    generator = loaded.task.build_generator([loaded.model], OmegaConf.create(generation))
    dictionary = loaded.task.target_dictionary
    hypotheses, references, tokens = [], [], 0
    for batch in loaded.batches():
        nbest_lists = loaded.task.inference_step(generator, [loaded.model], batch)
        for (best, *_), target in zip(nbest_lists, batch["target"], strict=True):
            hypotheses.append(dictionary.string(best["tokens"].cpu(), post_process))
            references.append(dictionary.string(target[target.ne(dictionary.pad())].cpu(), post_process))
            tokens += len(best["tokens"])
    return score_text(hypotheses, references)[0], tokens


def ablate(loaded: Loaded, beam: int, post_process: str | None) -> list[Ablation]:
    """Score the full model, then the model without each layer, from the lowest up.

    Raises:
        SurfaceFusionError: the model's fusion cannot leave a layer out.
    """
    fusion = getattr(loaded.model.encoder, "fusion", None)
    if fusion is None or not fusion.silenceable:
        silenceable = (name for name, method in methods().items() if method.silenceable)
        raise loaded.inapplicable("can leave out a layer", silenceable, "can")
    layers = ["Emb"] if loaded.setting("encoder_fusion_embedding") else []
    layers += [str(n) for n in range(1, loaded.model.cfg.encoder.layers + 1)]
    rows = [Ablation("none", *translate(loaded, beam, post_process))]
    for state, layer in enumerate(tqdm(layers, desc="layers silenced", unit="pass")):
        with silenced(fusion, state):
            rows.append(Ablation(layer, *translate(loaded, beam, post_process)))
    return rows


def percent_change(value: float, base: float) -> float:
    """Return the difference of *value* from *base* in percent of *base*; NaN if *base* is 0."""
    return 100 * (value / base - 1) if base else float("nan")


def draw(loaded: Loaded, out: Path, beam: int, post_process: str | None) -> list[Path]:
    """Write ``ablation.csv``, ``.png`` and ``.svg`` to the folder *out*."""
    if post_process is None:
        post_process = subword_marks(loaded.task.target_dictionary)
    measured = ablate(loaded, beam, post_process)
    full = measured[0]
    bleu = [percent_change(row.bleu.value, full.bleu.value) for row in measured]
    length = [percent_change(row.tokens, full.tokens) for row in measured]
    columns = ("silenced", "bleu", "bleu_change_percent", "tokens", "length_change_percent", "signature")
    rows = [
        (row.layer, f"{row.bleu.value:.4f}", f"{b:.2f}", row.tokens, f"{n:.2f}", row.bleu.signature)
        for row, b, n in zip(measured, bleu, length, strict=True)
    ]
    table = save_table(out / "ablation.csv", columns, rows)
    figure, axes = pyplot().subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    for ax, title, values in zip(axes, ("BLEU, % change", "length, % change"), (bleu, length), strict=True):
        ax.bar([row.layer for row in measured[1:]], values[1:])
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set(title=title, xlabel="encoder layer silenced")
    return [table, *save_figure(figure, out / "ablation")]
