"""Checkpoints load with torch's safe unpickler, and other files are named in one line."""

import argparse
import collections
import io
import os
import pickle
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils

from surface_fusion import SurfaceFusionError
from tests.helpers.paths import REFERENCE


def through_torch(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)  # weights_only, the default


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(lr=[0.1]),
        np.float64(1.5),
        np.float32(1.5),
        np.int64(3),
        np.array([1.0, 2.0]),
        collections.defaultdict(dict),
    ],
    ids=lambda value: type(value).__name__,
)
def test_objects_that_fairseq_stores_load_safely(value: object) -> None:
    loaded = through_torch({"value": value})["value"]
    assert np.array_equal(loaded, value) if isinstance(value, np.ndarray) else loaded == value


def test_numpy_1_names_load_under_numpy_2() -> None:
    data = pickle.dumps(np.float64(2.5), protocol=2).replace(b"numpy._core.", b"numpy.core.")
    file = io.BytesIO()
    torch.save({"x": 0}, file, _use_new_zipfile_serialization=False)
    assert b"numpy.core.multiarray" in data
    # The pickle of a legacy file is the pickle of its object: magic number, version, system, object, keys.
    parts = [pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {})]
    assert torch.load(io.BytesIO(b"".join(parts) + data + pickle.dumps([], protocol=2))) == 2.5


def test_a_checkpoint_that_runs_code_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"model": {}, "cfg": SimpleNamespace(run=os.getcwd)}, path)
    with pytest.raises(SurfaceFusionError, match=r"types\.SimpleNamespace.*--trust-checkpoint.*TORCH_FORCE"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


@pytest.mark.parametrize("content", [b"", b"text\n", b"PK\x03\x04 truncated", b"\x80\x02}q\x00."])
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.pt"
    path.write_bytes(content)
    with pytest.raises(SurfaceFusionError, match=r"foreign\.pt is truncated or not a fairseq checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    whole = REFERENCE / "checkpoint_best.pt"
    path = tmp_path / "half.pt"
    path.write_bytes(whole.read_bytes()[:400_000])
    with pytest.raises(SurfaceFusionError, match=r"half\.pt is truncated"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_a_missing_checkpoint_is_named() -> None:
    with pytest.raises(SurfaceFusionError, match=r"checkpoint nowhere\.pt does not exist"):
        checkpoint_utils.load_checkpoint_to_cpu("nowhere.pt")


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SurfaceFusionError, match=r"checkpoint .* is a folder; give a file in it"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path))


def test_a_state_dict_alone_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(SurfaceFusionError, match="not a fairseq checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "weights.pt"))


def test_overrides_that_are_no_dictionary_are_refused() -> None:
    with pytest.raises(SurfaceFusionError, match=r"--model-overrides \[1\] is not a dictionary"):
        checkpoint_utils.load_checkpoint_to_cpu("any.pt", [1])
