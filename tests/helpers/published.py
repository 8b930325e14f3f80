"""Checkpoints and data folders as the published code (a fork of fairseq 0.9) wrote them, from ``golden/``."""

import json
from argparse import Namespace
from collections import OrderedDict
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.testing import assert_close

from tests.helpers.paths import GOLDEN

GOLDEN_DIR = GOLDEN
GOLDEN_NAMES = sorted(path.stem for path in GOLDEN_DIR.glob("*.npz"))
LABEL_SMOOTHING = 0.1  # of all records
PAD = 1
SPECIAL_SYMBOLS = 4  # <s>, <pad>, </s>, <unk> are in no dict.*.txt


@dataclass(frozen=True)
class Golden:
    """One tiny model of the published code, see ``golden/README.md``."""

    name: str
    meta: dict[str, Any]
    arrays: dict[str, Tensor]
    param: dict[str, Tensor]
    """Its state dict, without what ``unused_param`` holds."""
    unused_param: dict[str, Tensor]
    grad: dict[str, Tensor]

    def __getitem__(self, key: str) -> Tensor:
        return self.arrays[key]

    def __contains__(self, key: str) -> bool:
        return key in self.arrays

    @property
    def state_dict(self) -> dict[str, Tensor]:
        """All parameters and buffers that the published code stored."""
        return self.param | self.unused_param

    @property
    def net_input(self) -> dict[str, Tensor]:
        """The batch as a model takes it."""
        return {key: self[key] for key in ("src_tokens", "src_lengths", "prev_output_tokens")}


def load_golden(name: str) -> Golden:
    """Read ``golden/NAME.npz``."""
    with np.load(GOLDEN_DIR / f"{name}.npz") as npz:
        meta = json.loads(str(npz["meta"]))
        arrays = {key: torch.from_numpy(npz[key]) for key in npz.files if key != "meta"}
    groups = {}
    for group in ("param", "unused_param", "grad"):
        shapes = meta.pop(group)
        parts = arrays.pop(group, torch.empty(0)).split([prod(shape) for shape in shapes.values()])
        groups[group] = {
            key: part.view(shape) for (key, shape), part in zip(shapes.items(), parts, strict=True)
        }
    return Golden(name, meta, arrays, **groups)


def checkpoint(args: dict[str, Any], state_dict: dict[str, Tensor]) -> dict[str, Any]:
    """What fairseq 0.9 stored at the end of a first epoch of three updates."""
    return {
        "args": Namespace(**args),
        "model": OrderedDict((name, tensor.clone()) for name, tensor in state_dict.items()),
        "optimizer_history": [
            {
                "criterion_name": "LabelSmoothedCrossEntropyCriterion",
                "optimizer_name": "FairseqNAG",
                "lr_scheduler_state": {"best": 4.0},
                "num_updates": 3,
            }
        ],
        "extra_state": {
            "train_iterator": {"epoch": 1, "iterations_in_epoch": 3, "shuffle": True},
            "val_loss": 4.0,
            "best": 4.0,
            "metrics": OrderedDict(),
        },
        "last_optimizer_state": {"state": {}, "param_groups": []},
    }


def save_legacy(state: dict[str, Any], path: Path) -> None:
    """Save in the file format of torch 1.4, the published code's."""
    torch.save(state, path, _use_new_zipfile_serialization=False)


def write_dictionary(path: Path, entries: int) -> None:
    """A dictionary file that fairseq loads as *entries* symbols."""
    path.write_text("".join(f"w{i} {entries - i}\n" for i in range(SPECIAL_SYMBOLS, entries)))


def write_checkpoint(golden: Golden, folder: Path, **changed_args: Any) -> Path:
    """Write *golden* as ``folder/checkpoint.pt``, and its dictionaries into ``folder/data-bin``."""
    data = folder / "data-bin"
    data.mkdir(parents=True)
    write_dictionary(data / "dict.src.txt", golden.meta["n_src"])
    write_dictionary(data / "dict.tgt.txt", golden.meta["n_tgt"])
    languages = {"data": str(data), "source_lang": "src", "target_lang": "tgt"}
    path = folder / "checkpoint.pt"
    save_legacy(checkpoint(golden.meta["args"] | languages | changed_args, golden.state_dict), path)
    return path


def losses(log_probs: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    """Label-smoothed and plain loss as fairseq 0.9 defined them, summed over target tokens.

    Args:
        log_probs: B x T x V.
        target: B x T, padded.
    """
    tokens = target != PAD
    log_probs, target = log_probs[tokens], target[tokens]
    nll = -log_probs.gather(-1, target.unsqueeze(-1)).sum()
    smooth = -log_probs.sum() / log_probs.size(-1)
    return (1 - LABEL_SMOOTHING) * nll + LABEL_SMOOTHING * smooth, nll


def assert_near(actual: Tensor, expected: Tensor, atol: float = 1e-4, what: str = "") -> None:
    """Fail unless both have the same shape and differ by at most *atol* anywhere."""
    assert_close(actual, expected, rtol=0.0, atol=atol, msg=lambda text: f"{what}: {text}")
