"""Predictions of the softmax layer's two branches, for each token of the references.

With the features h of the target branch and r of the surface branch, z = E h and s = E r
(``models/decoder.py``), each token has the top words of z, s and the fused distribution, their probabilities
of the reference's token, and the gate. The surface *decides* if the fused top word differs from the target
branch's. It *copies* if its own top word is in the source sentence and is not a special symbol.
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
    """One target token; words are ids, probabilities those of the reference's token."""

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
    """Every token of the split's references, in the order of its batches.

    Raises:
        SurfaceFusionError: the model has no surface fusion.
    """
    decoder: Any = loaded.model.decoder
    if loaded.setting("surfacefusion") is None:
        raise SurfaceFusionError("the model has no --surfacefusion, so it has no branches to compare")
    seen: list[tuple[Tensor, Tensor]] = []
    fuse = decoder._fuse

    def noted(h: Tensor, r: Tensor) -> Tensor:
        seen.append((h, r))
        fused: Tensor = fuse(h, r)
        return fused

    source_ids = _source_ids(loaded.task.source_dictionary, loaded.task.target_dictionary)
    decoder._fuse = noted
    try:
        for batch in loaded.batches():
            fused = loaded.model.get_normalized_probs(loaded.model(**batch["net_input"]), log_probs=True)
            yield from _of_batch(loaded, batch, source_ids, fused, *seen.pop())
    finally:
        del decoder._fuse


def _source_ids(source: Any, target: Any) -> Tensor:
    """For each word of the target dictionary its id in the source's, or -1; -1 for special symbols."""
    words = [target[i] for i in range(target.nspecial, len(target))]
    return torch.tensor([-1] * target.nspecial + [source.indices.get(word, -1) for word in words])


def _of_batch(
    loaded: Loaded, batch: Any, source_ids: Tensor, fused: Tensor, h: Tensor, r: Tensor
) -> Iterator[Token]:
    decoder: Any = loaded.model.decoder
    z, s = (log_softmax(decoder.output_projection(x)) for x in (h, r))
    gate: Tensor | None = None
    if loaded.model.cfg.learned_gate:
        gate = decoder._gate(torch.stack([h, r], dim=2)).squeeze(-1)
    elif loaded.model.cfg.mode.gated:
        gate = h.new_full(h.shape[:2], loaded.model.cfg.sf_gate)
    target = batch["target"]
    picked = [x.gather(-1, target[..., None]).squeeze(-1).exp() for x in (fused, z, s)]
    first = [x.argmax(-1) for x in (fused, z, s)]
    read = source_ids.to(h.device)[first[2]]
    copies = (read[..., None] == batch["net_input"]["src_tokens"][:, None]).any(-1)
    decides = first[0] != first[1]
    for row, column in target.ne(loaded.task.target_dictionary.pad()).nonzero().tolist():
        at = row, column
        yield Token(
            sentence=int(batch["id"][row]),
            position=column,
            reference=int(target[at]),
            fused=int(first[0][at]),
            target=int(first[1][at]),
            surface=int(first[2][at]),
            p_fused=float(picked[0][at]),
            p_target=float(picked[1][at]),
            p_surface=float(picked[2][at]),
            gate=None if gate is None else float(gate[at]),
            decides=bool(decides[at]),
            copies=bool(copies[at]),
        )


def summary(found: list[Token]) -> dict[str, float]:
    """Means over all tokens."""
    count = len(found)
    gates = [token.gate for token in found if token.gate is not None]
    return {
        "tokens": count,
        "surface_decides": sum(token.decides for token in found) / count,
        "surface_copies": sum(token.copies for token in found) / count,
        **({"gate": sum(gates) / len(gates)} if gates else {}),
        **{
            f"right_{branch}": sum(getattr(token, branch) == token.reference for token in found) / count
            for branch in BRANCHES
        },
    }


def write(loaded: Loaded, out: Path) -> list[Path]:
    """Write ``branches.csv`` (a line a token) and ``branches_summary.csv`` to the folder *out*."""
    return save(sorted(tokens(loaded)), loaded.task.target_dictionary, out)


def save(found: list[Token], words: Any, out: Path) -> list[Path]:
    """The files of :func:`write`, of the tokens *found*; *words* is the target dictionary."""
    rows = [
        (
            *(token.sentence, token.position),
            *(words[i] for i in (token.reference, token.fused, token.target, token.surface)),
            *(f"{p:.6g}" for p in (token.p_fused, token.p_target, token.p_surface)),
            "" if token.gate is None else f"{token.gate:.6g}",
            *(int(token.decides), int(token.copies)),
        )
        for token in found
    ]
    means = [(name, f"{value:.6g}") for name, value in summary(found).items()]
    return [
        save_table(out / "branches.csv", Token._fields, rows),
        save_table(out / "branches_summary.csv", ("what", "value"), means),
    ]
