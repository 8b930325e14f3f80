"""Reports on training with several processes, here two on the CPU."""

from pathlib import Path

import pytest

from tests.helpers.two_processes import ADAM, FLAT, start, status

LAYERDROP = ("--encoder-layerdrop", 0.5, "--decoder-layerdrop", 0.5)


@pytest.mark.parametrize(
    "flags",
    [(*ADAM, *LAYERDROP), (*FLAT, *LAYERDROP), (*ADAM, "--no-cross-attention")],
    ids=["adam", "flat_adam", "no-cross-attention"],
)
def test_unused_parameters(tmp_path: Path, flags: tuple[object, ...]) -> None:
    """ "Expected to have finished reduction" of torch's DDP."""
    log = tmp_path / "log"
    training = start(log, *flags, "--ddp-backend", "pytorch_ddp", "--max-update", 6)
    assert status(training, 240) == 0, log.read_text()[-3000:]
    assert "num_updates: 6 >= max_update: 6" in log.read_text()
