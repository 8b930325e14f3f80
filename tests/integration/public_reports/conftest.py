"""The reference checkpoint and a copy of its data folder."""

import shutil
from pathlib import Path

import pytest

from tests.helpers.paths import REFERENCE

CHECKPOINT = REFERENCE / "checkpoint_best.pt"


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return Path(shutil.copytree(REFERENCE / "data-bin", tmp_path / "data-bin"))
