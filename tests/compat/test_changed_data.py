"""Data that is removed or changed under a training is noticed when the epoch ends."""

import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, data_utils
from fairseq.trainer import Trainer

from surface_fusion import SurfaceFusionError
from surface_fusion.cli.main import main
from surface_fusion.compat.changed_data import check_data_files
from tests.helpers.paths import REFERENCE
from tests.helpers.small_training import TRAIN

DATA = REFERENCE / "data-bin"


def touch(folder: Path) -> None:
    """Give the training data another time."""
    os.utime(folder / "train.en-ro.en.bin")


@pytest.mark.parametrize(
    ("what", "said"), [("remove", "removed"), ("replace", "changed"), ("touch", "changed")]
)
def test_removed_or_changed_data_is_named(tmp_path: Path, what: str, said: str) -> None:
    folder = tmp_path / "data-bin"
    shutil.copytree(DATA, folder)
    dictionary = Dictionary.load(str(folder / "dict.en.txt"))
    data = data_utils.load_indexed_dataset(str(folder / "train.en-xx.en"), dictionary)
    check_data_files()
    file = folder / "train.en-xx.en.bin"
    if what == "remove":
        shutil.rmtree(folder)
    elif what == "replace":
        shutil.copy2(file, folder / "new")
        os.replace(folder / "new", file)
    else:
        os.utime(file)
    with pytest.raises(SurfaceFusionError, match=rf"data file .*train\.en-xx\.en\.bin was {said}"):
        check_data_files()
    assert len(data) == 2600
    del data
    check_data_files()  # a data set that is gone is nobody's


@pytest.mark.slow
@pytest.mark.parametrize(("change", "said"), [(shutil.rmtree, "removed"), (touch, "changed")])
def test_a_training_ends_with_one_line_after_it_has_saved(
    data: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    change: Callable[[Path], None],
    said: str,
) -> None:
    """0.1.0 trains to the end, status 0."""
    folder, saved = tmp_path / "data-bin", tmp_path / "checkpoints"
    shutil.copytree(data, folder)
    train_step = Trainer.train_step

    def step(trainer: Any, *args: Any, **kwargs: Any) -> Any:
        if trainer.get_num_updates() == 1:
            change(folder)
        return train_step(trainer, *args, **kwargs)

    monkeypatch.setattr(Trainer, "train_step", step)
    flags = (folder, *TRAIN, "--max-update", 5, "--save-interval-updates", 2, "--disable-validation")
    assert main(["train", *map(str, flags), "--save-dir", str(saved)]) == 2
    line = capfd.readouterr().err.splitlines()[-1]
    assert line.startswith("surface-fusion train: error: data file ") and f"was {said} while training" in line
    state = checkpoint_utils.load_checkpoint_to_cpu(str(saved / "checkpoint_last.pt"))
    assert state["optimizer_history"][-1]["num_updates"] == 2
