"""Public reports about ``fairseq-hydra-train``."""

from pathlib import Path

import pytest

from tests.helpers import warm_processes
from tests.helpers.paths import ROOT
from tests.integration.test_configs import SHORT

pytestmark = pytest.mark.slow


def train() -> None:
    """``fairseq-hydra-train`` in a process that has imported the package."""
    import fairseq_cli.hydra_train

    import surface_fusion  # noqa: F401

    fairseq_cli.hydra_train.cli_main()


def test_relative_user_dir_in_each_job(data: Path, user_dir: Path, tmp_path: Path) -> None:
    """Hydra runs each job in a folder of its own; the second job was refused."""
    (tmp_path / "surface_fusion").symlink_to(user_dir)
    overrides = {**SHORT, "task.data": str(data), "common.user_dir": "surface_fusion", "common.seed": "1,2"}
    overrides |= {"task.source_lang": "en", "task.target_lang": "xx", "optimization.max_update": "1"}
    done = warm_processes.run(
        f"{__name__}:train",
        *("-m", "--config-dir", ROOT / "configs", "--config-name=demo"),
        *(f"{name}={value}" for name, value in overrides.items()),
        cwd=tmp_path,
        merge=True,
    )
    assert done.returncode == 0, done.stdout[-3000:]
    assert done.stdout.count("done training") == 2
