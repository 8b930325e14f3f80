"""Start the command ``train`` for two gloo processes on the reference data."""

import socket
from multiprocessing.process import BaseProcess
from pathlib import Path

from tests.helpers import warm_processes
from tests.helpers.paths import REFERENCE
from tests.helpers.small_training import SIZES

DATA = REFERENCE / "data-bin"
FLAT = ("--optimizer", "flat_adam", "--criterion", "fused_label_smoothed_cross_entropy")
ADAM = ("--optimizer", "adam")
TRAIN = (
    *(DATA, *SIZES[:-5], "--encoder-attention-heads", 2, "--decoder-attention-heads", 2),
    *("--surfacefusion", "att", "--sf-gate", 0.8, "--lr", 0.005, "--max-tokens", 400, "--num-workers", 0),
    *("--cpu", "--log-format", "simple", "--log-interval", 1, "--no-save", "--disable-validation"),
    *("--distributed-world-size", 2, "--max-epoch", 500),
)


def start(log: Path, *flags: object) -> BaseProcess:
    """Start it; what it prints goes into *log*."""
    with log.open("w") as file:
        streams = {"stdout": file.fileno(), "stderr": file.fileno()}
        return warm_processes.start(warm_processes.SURFACE_FUSION, "train", *TRAIN, *flags, **streams)


def free_port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        return int(free.getsockname()[1])
