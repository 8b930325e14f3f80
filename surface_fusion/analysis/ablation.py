"""Measure BLEU without one encoder layer in the fusion: figure 2 of SurfaceFusion (Liu et al., 2021).

When decoding, the weight of one layer in the fusion is set to zero. The encoder still runs all layers, and
the other weights do not change. BLEU and length are relative to those of the full model.
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


class Translations(NamedTuple):
    """Translations of a split and their references, as plain text."""

    hypotheses: list[str]
    references: list[str]
    tokens: int
    """Number of tokens in the translations, including ``</s>``."""


class Ablation(NamedTuple):
    """One row of the table; *layer* is ``none`` for the full model."""

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
        return

    def zero_state(_: Any, args: tuple[list[torch.Tensor]]) -> tuple[list[torch.Tensor]]:
        return ([torch.zeros_like(x) if n == state else x for n, x in enumerate(args[0])],)

    hook = fusion.register_forward_pre_hook(zero_state)
    try:
        yield
    finally:
        hook.remove()


def translate(loaded: Loaded, beam: int, post_process: str | None) -> Translations:
    """Translate the split by beam search with length penalty 1."""
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
    return Translations(hypotheses, references, tokens)


def ablate(loaded: Loaded, beam: int, post_process: str | None) -> list[Ablation]:
    """Score the full model, then the model without each layer, from the lowest up.

    Raises:
        SurfaceFusionError: the model's fusion cannot leave a layer out.
    """
    fusion = getattr(loaded.model.encoder, "fusion", None)
    if fusion is None or not fusion.silenceable:
        silenceable = (name for name, method in methods().items() if method.silenceable)
        raise loaded.inapplicable("can leave out a layer", silenceable, "can")
    states = loaded.encoder_layers + bool(loaded.setting("encoder_fusion_embedding"))
    first = loaded.encoder_layers - states + 1
    rows = []
    for state in tqdm([None, *range(states)], desc="layers silenced", unit="pass"):
        layer = "none" if state is None else "Emb" if first + state == 0 else str(first + state)
        with contextlib.nullcontext() if state is None else silenced(fusion, state):
            translations = translate(loaded, beam, post_process)
        bleu = score_text(translations.hypotheses, translations.references)[0]
        rows.append(Ablation(layer, bleu, translations.tokens))
    return rows


def percent_change(value: float, base: float) -> float:
    """Return the difference of *value* from *base* in percent of *base*; NaN if *base* is 0."""
    return 100 * (value / base - 1) if base else float("nan")


def draw(loaded: Loaded, out: Path, beam: int, post_process: str | None) -> list[Path]:
    """Write ``ablation.csv``, ``.png`` and ``.svg`` to the folder *out*."""
    if post_process is None:
        post_process = subword_marks(loaded.task.target_dictionary)
    full, *layers = ablate(loaded, beam, post_process)
    columns = ("silenced", "bleu", "bleu_change_percent", "tokens", "length_change_percent", "signature")
    rows = [
        (
            *(row.layer, f"{row.bleu.value:.4f}", f"{percent_change(row.bleu.value, full.bleu.value):.2f}"),
            *(row.tokens, f"{percent_change(row.tokens, full.tokens):.2f}", row.bleu.signature),
        )
        for row in (full, *layers)
    ]
    table = save_table(out / "ablation.csv", columns, rows)
    figure, axes = pyplot().subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    names = [row.layer for row in layers]
    for ax, title, values in (
        (axes[0], "BLEU, % change", [percent_change(row.bleu.value, full.bleu.value) for row in layers]),
        (axes[1], "length, % change", [percent_change(row.tokens, full.tokens) for row in layers]),
    ):
        ax.bar(names, values)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_title(title)
        ax.set_xlabel("encoder layer silenced")
    return [table, *save_figure(figure, out / "ablation")]
