"""Reports on training with several processes, here two on the CPU."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.helpers import warm_processes
from tests.helpers.two_processes import ADAM, FLAT, start

pytestmark = pytest.mark.slow

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
    assert warm_processes.wait(training, 240) == 0, log.read_text()[-3000:]
    assert "num_updates: 6 >= max_update: 6" in log.read_text()


def test_an_interrupt_of_the_first_process_ends_all(tmp_path: Path) -> None:
    """It waited for the others, which trained on; a second interrupt leaked their semaphores."""
    log = tmp_path / "log"
    training = start(log, *ADAM)
    while "num_updates=1," not in log.read_text() and training.exitcode is None:
        time.sleep(0.2)
    assert training.pid is not None
    os.kill(training.pid, signal.SIGINT)
    assert warm_processes.wait(training, 60) == 130
    assert "leaked" not in log.read_text() and "Traceback" not in log.read_text()
