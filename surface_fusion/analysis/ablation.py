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
from surface_fusion.encoder_fusion import LayerAttention, methods
from surface_fusion.encoder_fusion.registry import inapplicable
from surface_fusion.scoring import Score, score_text


class Translated(NamedTuple):
    """Translations and references as plain text, and the translations' tokens with their ends."""

    hypotheses: list[str]
    references: list[str]
    tokens: int


class Ablated(NamedTuple):
    """One line of the table; *layer* is ``none`` for the whole model."""

    layer: str
    bleu: Score
    tokens: int


@contextlib.contextmanager
def silenced(fusion: Any, state: int) -> Iterator[None]:
    """Set the weight of state number *state* (0 is the first) in *fusion* to zero."""
    if isinstance(fusion, LayerAttention):
        fusion.silenced.append(state)
        try:
            yield
        finally:
            fusion.silenced.remove(state)
        return

    def without(_: Any, args: tuple[list[torch.Tensor]]) -> tuple[list[torch.Tensor]]:
        return ([torch.zeros_like(x) if n == state else x for n, x in enumerate(args[0])],)

    hook = fusion.register_forward_pre_hook(without)
    try:
        yield
    finally:
        hook.remove()


def subword_marks(dictionary: Any) -> str | None:
    """How the dictionary's subwords are joined, as ``--remove-bpe`` names it; None where they look whole."""
    words = [dictionary[i] for i in range(dictionary.nspecial, len(dictionary))]
    if any(word.startswith("\u2581") for word in words):
        return "sentencepiece"
    return "@@ " if any(word.endswith("@@") for word in words) else None


def translate(loaded: Loaded, beam: int, post_process: str | None) -> Translated:
    """Translate the split by beam search with length penalty 1."""
    generation = {"beam": beam, "lenpen": 1.0, "max_len_a": 1.2, "max_len_b": 10}
    generator = loaded.task.build_generator([loaded.model], OmegaConf.create(generation))
    words = loaded.task.target_dictionary
    hypotheses, references, tokens = [], [], 0
    for batch in loaded.batches():
        found = loaded.task.inference_step(generator, [loaded.model], batch)
        for hypothesis, target in zip(found, batch["target"], strict=True):
            hypotheses.append(words.string(hypothesis[0]["tokens"].cpu(), post_process))
            references.append(words.string(target[target.ne(words.pad())].cpu(), post_process))
            tokens += len(hypothesis[0]["tokens"])
    return Translated(hypotheses, references, tokens)


def ablate(loaded: Loaded, beam: int, post_process: str | None) -> list[Ablated]:
    """The whole model, then each layer silenced from the lowest up.

    Raises:
        SurfaceFusionError: the model's fusion cannot leave a layer out.
    """
    fusion = getattr(loaded.model.encoder, "fusion", None)
    if fusion is None or not fusion.silenceable:
        able = (name for name, method in methods().items() if method.silenceable)
        raise inapplicable(loaded.setting("encoder_fusion"), "can leave out a layer", able, "can")
    states = loaded.encoder_layers + bool(loaded.setting("encoder_fusion_embedding"))
    first = loaded.encoder_layers - states + 1
    found = []
    for state in tqdm([None, *range(states)], desc="layers silenced", unit="pass"):
        layer = "none" if state is None else "Emb" if first + state == 0 else str(first + state)
        with contextlib.nullcontext() if state is None else silenced(fusion, state):
            done = translate(loaded, beam, post_process)
        found.append(Ablated(layer, score_text(done.hypotheses, done.references)[0], done.tokens))
    return found


def change(value: float, base: float) -> float:
    """Difference of *value* from *base* in percent."""
    return 100 * (value / base - 1) if base else float("nan")


def draw(loaded: Loaded, out: Path, beam: int, post_process: str | None) -> list[Path]:
    """Write ``ablation.csv``, ``.png`` and ``.svg`` to the folder *out*."""
    if post_process is None:
        post_process = subword_marks(loaded.task.target_dictionary)
    whole, *layers = ablate(loaded, beam, post_process)
    columns = ("silenced", "bleu", "bleu_change_percent", "tokens", "length_change_percent", "signature")
    rows = [
        (
            *(row.layer, f"{row.bleu.value:.4f}", f"{change(row.bleu.value, whole.bleu.value):.2f}"),
            *(row.tokens, f"{change(row.tokens, whole.tokens):.2f}", row.bleu.signature),
        )
        for row in (whole, *layers)
    ]
    table = save_table(out / "ablation.csv", columns, rows)
    figure, axes = pyplot().subplots(1, 2, figsize=(7.5, 3), layout="constrained")
    names = [row.layer for row in layers]
    for ax, title, values in (
        (axes[0], "BLEU, % change", [change(row.bleu.value, whole.bleu.value) for row in layers]),
        (axes[1], "length, % change", [change(row.tokens, whole.tokens) for row in layers]),
    ):
        ax.bar(names, values)
        ax.axhline(0, color="black", linewidth=0.8)
        ax.set_title(title)
        ax.set_xlabel("encoder layer silenced")
    return [table, *save_figure(figure, out / "ablation")]
