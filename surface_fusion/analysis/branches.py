"""Predictions of the two branches of the softmax layer, for each token of the references.

The target branch has the features h and the logits z = E h, the surface branch the features r and the logits
s = E r (``models/decoder.py``). For each token, the table has the most probable word under z, s and the
fused distribution, the probability of the reference token under each, and the gate. The surface branch
*decides* a token if the most probable word of the fused distribution differs from that of the target branch.
It *copies* if its most probable word is in the source sentence and is not a special symbol.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from surface_fusion.analysis.figures import save_table
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.ops.distributions import log_softmax

BRANCHES = ("fused", "target", "surface")


class Token(NamedTuple):
    """One target token; words are ids, probabilities are those of the reference token."""

    sentence: int
    position: int
    reference: int
    fused: int
    target: int
    surface: int
    p_fused: float
    p_target: float
    p_surface: float
    gate: float | None
    decides: bool
    copies: bool


@torch.no_grad()
def tokens(loaded: Loaded) -> Iterator[Token]:
    """Yield every token of the split's references, in the order of its batches.

    Raises:
        SurfaceFusionError: the model has no surface fusion.
    """
    decoder: Any = loaded.model.decoder
    if loaded.setting("surfacefusion") is None:
        raise SurfaceFusionError("the model has no --surfacefusion, so it has no branches to compare")
    branches: list[tuple[Tensor, Tensor]] = []
    fuse = decoder.fuse

    def recording_fuse(h: Tensor, r: Tensor) -> Tensor:
        branches.append((h, r))
        fused: Tensor = fuse(h, r)
        return fused

    source_ids = _source_ids(loaded.task.source_dictionary, loaded.task.target_dictionary)
    decoder.fuse = recording_fuse
    try:
        for batch in loaded.batches():
            fused = loaded.model.get_normalized_probs(loaded.model(**batch["net_input"]), log_probs=True)
            yield from _tokens_of_batch(loaded, batch, source_ids, fused, *branches.pop())
    finally:
        del decoder.fuse


def _source_ids(source: Any, target: Any) -> Tensor:
    """Map each id of the target dictionary to the word's id in the source dictionary.

    Special symbols and words that are not in the source dictionary are mapped to -1.
    """
    words = [target[i] for i in range(target.nspecial, len(target))]
    return torch.tensor([-1] * target.nspecial + [source.indices.get(word, -1) for word in words])


def _tokens_of_batch(
    loaded: Loaded, batch: Any, source_ids: Tensor, fused: Tensor, h: Tensor, r: Tensor
) -> Iterator[Token]:
    decoder: Any = loaded.model.decoder
    z, s = (log_softmax(decoder.output_projection(x)) for x in (h, r))
    gate: Tensor | None = None
    if loaded.model.cfg.learned_gate:
        gate = decoder.gate(torch.stack([h, r], dim=2)).squeeze(-1)
    elif loaded.model.cfg.mode.gated:
        gate = h.new_full(h.shape[:2], loaded.model.cfg.sf_gate)
    target = batch["target"]
    top_words = [x.argmax(-1) for x in (fused, z, s)]
    surface_source_ids = source_ids.to(h.device)[top_words[2]]
    columns = (
        batch["id"][:, None].expand_as(target),
        torch.arange(target.shape[1], device=target.device).expand_as(target),
        target,
        *top_words,
        *(x.gather(-1, target[..., None]).squeeze(-1).exp() for x in (fused, z, s)),
        top_words[0] != top_words[1],
        (surface_source_ids[..., None] == batch["net_input"]["src_tokens"][:, None]).any(-1),
    )
    real = target.ne(loaded.task.target_dictionary.pad())
    *facts, decides, copies = (column[real].tolist() for column in columns)
    gates = [None] * len(decides) if gate is None else gate[real].tolist()
    yield from map(Token, *facts, gates, decides, copies)


def summary(all_tokens: list[Token]) -> dict[str, float]:
    """Return the means over *all_tokens*."""
    count = len(all_tokens)
    gates = [token.gate for token in all_tokens if token.gate is not None]
    return {
        "tokens": count,
        "surface_decides": sum(token.decides for token in all_tokens) / count,
        "surface_copies": sum(token.copies for token in all_tokens) / count,
        **({"gate": sum(gates) / len(gates)} if gates else {}),
        **{
            f"right_{branch}": sum(getattr(token, branch) == token.reference for token in all_tokens) / count
            for branch in BRANCHES
        },
    }


def write(loaded: Loaded, out: Path) -> list[Path]:
    """Write ``branches.csv`` (one row per token) and ``branches_summary.csv`` to the folder *out*."""
    return save(sorted(tokens(loaded)), loaded.task.target_dictionary, out)


def save(all_tokens: list[Token], dictionary: Any, out: Path) -> list[Path]:
    """Write the two tables of *all_tokens*, whose words *dictionary* names, to the folder *out*."""
    rows = [
        (
            *(token.sentence, token.position),
            *(dictionary[i] for i in (token.reference, token.fused, token.target, token.surface)),
            *(f"{p:.6g}" for p in (token.p_fused, token.p_target, token.p_surface)),
            "" if token.gate is None else f"{token.gate:.6g}",
            *(int(token.decides), int(token.copies)),
        )
        for token in all_tokens
    ]
    means = [(name, f"{value:.6g}") for name, value in summary(all_tokens).items()]
    return [
        save_table(out / "branches.csv", Token._fields, rows),
        save_table(out / "branches_summary.csv", ("what", "value"), means),
    ]
