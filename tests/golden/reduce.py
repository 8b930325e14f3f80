"""Reduce the published code's full records to what the tests read: ``reduce.py FOLDER_OF_FULL_RECORDS``."""

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

KEPT = (
    "src_tokens",
    "src_lengths",
    "prev_output_tokens",
    "target",
    "log_probs",
    "loss",
    "nll_loss",
    "tgt_logits",
    "src_logits",
    "gate",
    "encoder_embedding",
    "src_mean_emb",
    "src_max_emb",
    "inc_log_probs",
    "beam_tokens",
    "beam_lengths",
    "beam_scores",
    "beam_pos_scores",
)
KEPT_META = ("args", "n_src", "n_tgt", "grad_none", "versions")
KEPT_BEAM = ("beam_size", "lenpen", "max_len_a", "max_len_b", "min_len", "unkpen", "temperature")


def reduce(full: Any) -> dict[str, Any]:
    """The kept arrays; parameters and gradients as one vector each, their names and shapes in ``meta``."""
    meta = json.loads(str(full["meta"]))
    kept_meta = {key: meta[key] for key in KEPT_META}
    kept_meta["beam"] = {key: meta["beam"][key] for key in KEPT_BEAM}
    kept = {key: full[key] for key in KEPT if key in full.files}
    for group in ("param", "unused_param", "grad"):
        names = [key for key in full.files if key.startswith(f"{group}/")]
        kept_meta[group] = {name.partition("/")[2]: full[name].shape for name in names}
        if names:
            kept[group] = np.concatenate([full[name].ravel() for name in names])
    return kept | {"meta": np.array(json.dumps(kept_meta))}


if __name__ == "__main__":
    for path in sorted(Path(sys.argv[1]).glob("*.npz")):
        np.savez_compressed(Path(__file__).with_name(path.name), **reduce(np.load(path)))
