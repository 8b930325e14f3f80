"""What is compared: three command lines of ``fairseq-train`` with one model size and one data set."""

import logging
import os
import queue
import subprocess
import tempfile
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import CancelledError, ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import TypeVar

import torch

import surface_fusion

USER_DIR = ("--user-dir", str(Path(surface_fusion.__file__).parent))
OURS = (*USER_DIR, "-a", "transformer_surface_fusion")
FUSION = ("--surfacefusion", "att", "--sf-gate", "0.8", "--sf-mode", "hard")
STOCK = ("--optimizer", "adam", "--criterion", "label_smoothed_cross_entropy")
FAST = ("--optimizer", "flat_adam", "--criterion", "fused_label_smoothed_cross_entropy")
MODELS: dict[str, tuple[str, ...]] = {
    "fairseq": ("-a", "transformer", *STOCK),
    "plain": (*OURS, *FUSION, "--sf-plain", *STOCK),
    "fast": (*OURS, *FUSION, *FAST),
    "vanilla": (*OURS, *FAST),
}
"""Model, optimizer and loss of each contender; ``vanilla`` is the model of ``fairseq``, trained fast."""

ONLY_LAST = ("--no-epoch-checkpoints", "--save-interval", "1000000")
"""Of a training that saves its last checkpoint and no other."""

RECIPE = (
    *("--share-all-embeddings", "--dropout", "0.3", "--attention-dropout", "0.1", "--label-smoothing", "0.1"),
    *("--adam-betas", "(0.9, 0.98)", "--lr", "5e-4", "--lr-scheduler", "inverse_sqrt"),
    *("--warmup-updates", "4000", "--warmup-init-lr", "1e-7", "--seed", "1"),
    "--grouped-shuffling",  # GPUs wait for each other, so their batches of an update should be alike
    *("--no-progress-bar", "--log-format", "json", "--log-interval", "100", "--disable-validation"),
)
"""The README's training, the same for all."""


def _size(layers: int, width: int, feed_forward: int, heads: int) -> tuple[str, ...]:
    flags = []
    for stack in ("encoder", "decoder"):
        flags += [f"--{stack}-layers", layers, f"--{stack}-embed-dim", width]
        flags += [f"--{stack}-ffn-embed-dim", feed_forward, f"--{stack}-attention-heads", heads]
    return tuple(map(str, flags))


SIZES = {
    "base": _size(6, 512, 2048, 8),
    "small": _size(6, 256, 1024, 4),
    "demo": _size(3, 192, 768, 4),
    "tiny": _size(1, 16, 32, 2),
}
"""The README's model, one as deep and half as wide, that of its demo, and that of ``--quick``."""

PRECISION: dict[str, tuple[str, ...]] = {"fp16": ("--fp16",), "bf16": ("--bf16",), "fp32": ()}

SAMPLE = Path(__file__).parents[2] / "tests" / "data" / "enro"
"""Text of ``--quick``."""


def training_flags(
    contender: str, data: Path, *, size: str, max_tokens: int, dtype: str, workers: int, cpu: bool
) -> list[str]:
    """The command line of a training, but for where it ends and what it saves."""
    return [
        *(str(data), *MODELS[contender], *RECIPE, *SIZES[size], *PRECISION[dtype]),
        *("--max-tokens", str(max_tokens), "--num-workers", str(workers), *(("--cpu",) if cpu else ())),
    ]


@contextmanager
def data_folder(data: Path | None, quick: bool) -> Iterator[Path]:
    """*data*, or the sample, binarised for as long as the context lasts.

    Raises:
        SystemExit: there is neither.
    """
    if data is not None:
        if not any(data.glob("dict.*.txt")):
            raise SystemExit(f"{data} has no dict.*.txt; give a folder that fairseq-preprocess wrote")
        yield data
    elif not quick:
        raise SystemExit("give DATA-BIN, what fairseq-preprocess --joined-dictionary wrote, or --quick")
    else:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            yield binarise_sample(Path(folder, "data-bin"))


def binarise_sample(folder: Path) -> Path:
    """The sample's words in *folder*, as ``fairseq-preprocess`` writes them."""
    from fairseq import options
    from fairseq_cli import preprocess

    flags = ["-s", "en", "-t", "ro", "--joined-dictionary", "--destdir", str(folder)]
    for split in ("train", "valid", "test"):
        flags += [f"--{split}pref", str(SAMPLE / split)]
    preprocess.logger.setLevel(logging.WARNING)
    preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    return folder


def child_environment(device: int | None = None, triton_cache: Path | None = None) -> dict[str, str]:
    """The environment of a child process: this package can be imported there, too.

    Args:
        device: the only GPU that it sees, by its number among those that we see.
        triton_cache: where compiled kernels are kept; empty at first, so that a cold start is cold.

    Raises:
        SystemExit: we do not see that many.
    """
    package = str(Path(surface_fusion.__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package}
    if device is not None:
        seen = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = seen.split(",") if seen else [str(n) for n in range(device + 1)]
        if device >= len(names):
            raise SystemExit(
                f"CUDA_VISIBLE_DEVICES={seen} has no GPU number {device}, from 0; name more there"
            )
        environment["CUDA_VISIBLE_DEVICES"] = names[device]
    if triton_cache is not None:
        environment["TRITON_CACHE_DIR"] = str(triton_cache)
    return environment


def output_of(command: Sequence[str], environment: dict[str, str]) -> str:
    """What a child process printed.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    printed = done.stdout.decode("utf-8", "replace")  # Python would end lines at carriage returns, too
    if done.returncode:
        name = " ".join(command[1:3])
        last = "\n".join(line[:300] for line in printed.splitlines()[-80:])
        raise SystemExit(f"{name} ended with status {done.returncode}:\n{last}")
    return printed


Item = TypeVar("Item")
Result = TypeVar("Result")


def on_gpus(
    work: Callable[[Item, int | None], Result], items: Iterable[Item], *, at_once: int
) -> Iterator[Result]:
    """``work(item, device)`` for each item, in their order; *at_once* of them, spread over the GPUs.

    One at a time has all GPUs: device None, as where there is none. After a failure nothing more is begun.
    """
    gpus = torch.cuda.device_count() if at_once > 1 else 0
    free = queue.SimpleQueue[int | None]()
    for i in range(at_once):
        free.put(i % gpus if gpus else None)

    failed = threading.Event()

    def on_free_gpu(item: Item) -> Result:
        if failed.is_set():
            raise CancelledError
        device = free.get()
        try:
            return work(item, device)
        except BaseException:
            failed.set()
            raise
        finally:
            free.put(device)

    with ThreadPoolExecutor(at_once) as pool:
        yield from pool.map(on_free_gpu, items)
