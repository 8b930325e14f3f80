"""Several trainings in one process do not see each other."""

import argparse
import logging
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace

import fairseq_cli.train
import pytest
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import progress_bar

from surface_fusion.cli.main import main
from surface_fusion.compat.global_state import clear_training_state
from tests.helpers import warm_processes
from tests.helpers.paths import ROOT
from tests.helpers.small_training import TRAIN
from tests.helpers.tiny import parse


def test_global_state_of_fairseq_is_reset(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    writer = SimpleNamespace(close=lambda: closed.append("train"))
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {"train": writer}, raising=False)
    checkpoint_utils.save_checkpoint.best = 1.5
    fairseq_cli.train.should_stop_early.best, fairseq_cli.train.should_stop_early.num_runs = 1.5, 2
    logger = logging.getLogger("fairseq_cli.train")
    files = [logging.FileHandler(tmp_path / name) for name in ("first", "second")]
    for handler in files:
        logger.addHandler(handler)
    clear_training_state(str(tmp_path / "second"))
    assert [h for h in logger.handlers if isinstance(h, logging.FileHandler)] == files[1:]
    clear_training_state()
    assert not any(isinstance(h, logging.FileHandler) for h in logger.handlers)
    assert not hasattr(checkpoint_utils.save_checkpoint, "best")
    assert not {"best", "num_runs"} & set(vars(fairseq_cli.train.should_stop_early))
    assert closed == ["train"] and not progress_bar._tensorboard_writers


def with_fairseqs_main(data: Path, flags: Sequence[str]) -> None:
    args: argparse.Namespace = parse(*flags, data=str(data))
    fairseq_cli.train.main(convert_namespace_to_omegaconf(args))


def with_our_command(data: Path, flags: Sequence[str]) -> None:
    assert main(["train", str(data), *flags]) == 0


def best_of(folder: Path) -> float:
    """The value of ``checkpoint_best.pt``, which is also what the file remembers as the best."""
    state = checkpoint_utils.load_checkpoint_to_cpu(str(folder / "checkpoint_best.pt"))["extra_state"]
    assert state["val_loss"] == state["best"]
    return state["best"]


@pytest.mark.slow
@pytest.mark.parametrize("train", [with_fairseqs_main, with_our_command])
def test_the_second_training_has_its_own_best_checkpoint(
    data: Path, tmp_path: Path, train: Callable[[Path, Sequence[str]], None]
) -> None:
    """It is worse than the first; by fairseq's own main 0.1.0 writes no checkpoint_best.pt for it."""
    for name, updates in (("first", 8), ("second", 1)):
        flags = (*TRAIN, "--max-update", updates, "--save-dir", tmp_path / name, "--patience", 1)
        train(data, list(map(str, flags)))
    assert best_of(tmp_path / "second") > best_of(tmp_path / "first")


@pytest.mark.slow
def test_jobs_of_a_hydra_multirun_have_their_own_best_checkpoints(
    data: Path, user_dir: Path, tmp_path: Path
) -> None:
    """The first job imports the package, in the midst of fairseq's ``main``."""
    configs = ROOT / "configs"
    done = warm_processes.run(
        *("fairseq_cli.hydra_train:cli_main", "-m"),
        *("--config-dir", configs, "--config-name", "demo", f"hydra.sweep.dir={tmp_path}/jobs"),
        *(f"common.user_dir={user_dir}", f"task.data={data}", "common.cpu=true"),
        *("model.encoder_layers=1", "model.decoder_layers=1", "model.encoder_embed_dim=16"),
        *("model.decoder_embed_dim=16", "dataset.max_tokens=400", "dataset.num_workers=0"),
        "optimization.max_update=8,1",
        f"checkpoint.save_dir={tmp_path}/${{optimization.max_update}}",
        cwd=tmp_path,
        merge=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert best_of(tmp_path / "1") > best_of(tmp_path / "8")
