"""The systems compared: command lines of ``fairseq-train`` that differ in model, optimizer and criterion."""

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
from surface_fusion.cli.atomic_outputs import close_logs

USER_DIR = ("--user-dir", str(Path(surface_fusion.__file__).parent))
OURS = (*USER_DIR, "-a", "transformer_surface_fusion")
FUSION = ("--surfacefusion", "att", "--sf-gate", "0.8", "--sf-mode", "hard")
FAIRSEQS = ("--optimizer", "adam", "--criterion", "label_smoothed_cross_entropy")
FAST = ("--optimizer", "flat_adam", "--criterion", "fused_label_smoothed_cross_entropy")
MODELS: dict[str, tuple[str, ...]] = {
    "fairseq": ("-a", "transformer", *FAIRSEQS),
    "plain": (*OURS, *FUSION, "--sf-plain", *FAIRSEQS),
    "fast": (*OURS, *FUSION, *FAST),
    "vanilla": (*OURS, *FAST),
}
"""Model, optimizer and loss of each contender; ``vanilla`` is the model of ``fairseq`` on the fast path."""

LAST_CHECKPOINT_ONLY = ("--no-epoch-checkpoints", "--save-interval", "1000000")
"""Flags of a training that saves no checkpoint but the last."""

RECIPE = (
    *("--share-all-embeddings", "--dropout", "0.3", "--attention-dropout", "0.1", "--label-smoothing", "0.1"),
    *("--adam-betas", "(0.9, 0.98)", "--lr", "5e-4", "--lr-scheduler", "inverse_sqrt"),
    *("--warmup-updates", "4000", "--warmup-init-lr", "1e-7", "--seed", "1"),
    "--grouped-shuffling",  # batches of equal size on all GPUs of an update, which wait for each other
    *("--no-progress-bar", "--log-format", "json", "--log-interval", "100", "--disable-validation"),
)
"""The README's training flags, the same for all contenders."""


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
"""The README's model, one of the same depth and half the width, the demo's, and that of ``--quick``."""

PRECISION: dict[str, tuple[str, ...]] = {"fp16": ("--fp16",), "bf16": ("--bf16",), "fp32": ()}

SAMPLE = Path(__file__).parents[2] / "tests" / "data" / "enro"
"""The text for ``--quick``."""


def training_flags(
    contender: str, data: Path, *, size: str, max_tokens: int, dtype: str, workers: int, cpu: bool
) -> list[str]:
    """Return a training's command line, except for the flags of its end and its checkpoints."""
    return [
        *(str(data), *MODELS[contender], *RECIPE, *SIZES[size], *PRECISION[dtype]),
        *("--max-tokens", str(max_tokens), "--num-workers", str(workers), *(("--cpu",) if cpu else ())),
    ]


@contextmanager
def data_folder(data: Path | None, quick: bool) -> Iterator[Path]:
    """Yield *data*; if it is None and *quick*, a temporary folder with the binarised sample.

    Raises:
        SystemExit: *data* is not a data folder, or there is neither *data* nor *quick*.
    """
    if data is not None:
        if not any(data.glob("dict.*.txt")):
            raise SystemExit(f"{data} has no dict.*.txt; give a folder that fairseq-preprocess wrote")
        yield data
    elif not quick:
        raise SystemExit("give DATA-BIN, the output of fairseq-preprocess --joined-dictionary, or --quick")
    else:
        with tempfile.TemporaryDirectory(prefix="bench-") as folder:
            yield binarise_sample(Path(folder, "data-bin"))


def binarise_sample(folder: Path) -> Path:
    """Binarise the sample's words in *folder* with ``fairseq-preprocess`` and return *folder*."""
    from fairseq import options
    from fairseq_cli import preprocess

    flags = ["-s", "en", "-t", "ro", "--joined-dictionary", "--destdir", str(folder)]
    for split in ("train", "valid", "test"):
        flags += [f"--{split}pref", str(SAMPLE / split)]
    preprocess.logger.setLevel(logging.WARNING)
    handlers = list(preprocess.logger.handlers)
    preprocess.main(options.get_preprocessing_parser().parse_args(flags))
    close_logs(preprocess.logger, handlers)
    return folder


def child_environment(device: int | None = None, triton_cache: Path | None = None) -> dict[str, str]:
    """Return the environment of a child process, in which this package can be imported.

    Args:
        device: the only GPU visible there, by its index among those visible here; None for all.
        triton_cache: folder of compiled kernels; an empty one for a cold start.

    Raises:
        SystemExit: *device* is not visible here.
    """
    package = str(Path(surface_fusion.__file__).parents[1])
    path = os.environ.get("PYTHONPATH")
    environment = {**os.environ, "PYTHONPATH": f"{package}{os.pathsep}{path}" if path else package}
    if device is not None:
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        names = visible.split(",") if visible else [str(n) for n in range(device + 1)]
        if device >= len(names):
            raise SystemExit(
                f"CUDA_VISIBLE_DEVICES={visible} has no GPU number {device} (from 0); name more GPUs there"
            )
        environment["CUDA_VISIBLE_DEVICES"] = names[device]
    if triton_cache is not None:
        environment["TRITON_CACHE_DIR"] = str(triton_cache)
    return environment


def output_of(command: Sequence[str], environment: dict[str, str]) -> str:
    """Run *command* in a child process and return what it prints.

    Raises:
        SystemExit: it failed; the message has the end of its output.
    """
    process = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment)
    output = process.stdout.decode("utf-8", "replace")  # not text=True, which changes carriage returns
    if process.returncode:
        name = " ".join(command[1:3])
        last = "\n".join(line[:300] for line in output.splitlines()[-80:])
        raise SystemExit(f"{name} ended with status {process.returncode}:\n{last}")
    return output


Item = TypeVar("Item")
Result = TypeVar("Result")


def on_gpus(
    work: Callable[[Item, int | None], Result], items: Iterable[Item], *, at_once: int
) -> Iterator[Result]:
    """Yield ``work(item, device)`` for each item in order, with *at_once* threads spread over the GPUs.

    *device* is the index of a GPU; None if there is no GPU, or one thread, which may use all GPUs. After a
    failure, no further item is started.
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
