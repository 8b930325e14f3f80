"""Several trainings in one process do not see each other."""

import argparse
import logging
from pathlib import Path
from types import SimpleNamespace

import fairseq_cli.train
import pytest
from fairseq import checkpoint_utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.logging import progress_bar

from surface_fusion.compat.process_state import forget_last_training
from tests.small_training import TRAIN
from tests.tiny import parse


def test_what_fairseq_keeps_is_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    closed: list[str] = []
    writer = SimpleNamespace(close=lambda: closed.append("train"))
    monkeypatch.setattr(progress_bar, "_tensorboard_writers", {"train": writer}, raising=False)
    checkpoint_utils.save_checkpoint.best = 1.5
    fairseq_cli.train.should_stop_early.best, fairseq_cli.train.should_stop_early.num_runs = 1.5, 2
    logger = logging.getLogger("fairseq_cli.train")
    files = [logging.FileHandler(tmp_path / name) for name in ("first", "second")]
    for handler in files:
        logger.addHandler(handler)
    forget_last_training(str(tmp_path / "second"))
    assert [h for h in logger.handlers if isinstance(h, logging.FileHandler)] == files[1:]
    forget_last_training()
    assert not any(isinstance(h, logging.FileHandler) for h in logger.handlers)
    assert not hasattr(checkpoint_utils.save_checkpoint, "best")
    assert not {"best", "num_runs"} & set(vars(fairseq_cli.train.should_stop_early))
    assert closed == ["train"] and not progress_bar._tensorboard_writers


def test_the_second_training_has_its_own_best_checkpoint(data: Path, tmp_path: Path) -> None:
    """It is worse than the first; on 0.1.0, by fairseq's own main, it has no checkpoint_best.pt."""
    best: list[float] = []
    for name, updates in (("first", 8), ("second", 1)):
        flags = (*TRAIN, "--max-update", updates, "--save-dir", tmp_path / name, "--patience", 1)
        args: argparse.Namespace = parse(*map(str, flags), data=str(data))
        fairseq_cli.train.main(convert_namespace_to_omegaconf(args))
        state = checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / name / "checkpoint_best.pt"))
        best.append(state["extra_state"]["best"])
        assert state["extra_state"]["val_loss"] == best[-1]
    assert best[1] > best[0]
