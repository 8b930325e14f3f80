"""Public reports about ``fairseq-hydra-train``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.helpers.paths import ROOT
from tests.integration.test_configs import SHORT

pytestmark = pytest.mark.slow

TRAIN = "import surface_fusion; from fairseq_cli.hydra_train import cli_main; cli_main()"


def test_relative_user_dir_in_each_job(data: Path, user_dir: Path, tmp_path: Path) -> None:
    """Hydra runs each job in a folder of its own; the second job was refused."""
    (tmp_path / "surface_fusion").symlink_to(user_dir)
    overrides = {**SHORT, "task.data": str(data), "common.user_dir": "surface_fusion", "common.seed": "1,2"}
    overrides |= {"task.source_lang": "en", "task.target_lang": "xx", "optimization.max_update": "1"}
    command = [sys.executable, "-c", TRAIN, "-m", "--config-dir", str(ROOT / "configs"), "--config-name=demo"]
    done = subprocess.run(
        [*command, *(f"{name}={value}" for name, value in overrides.items())],
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(user_dir.parent), "PYTHONWARNINGS": "ignore"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("done training") == 2
