"""Table ``profile``: the time of a training update by kind of kernel.

    python scripts/bench/step_profile.py DATA-BIN     fp16, one GPU, 16,384 and 2,048 tokens
    python scripts/bench/step_profile.py --quick      tiny, on the CPU if there is no GPU

The trainer repeats updates on the same few real batches, first without torch's profiler, which slows the
host, then with it. Values are means over all updates, in milliseconds per update:

* ``part=all``: wall time without the profiler (the median over passes);
* ``part=matrix products`` and others: sum over the kernels that belong to the part by their names, see
  ``PARTS``. Matrix products are the floor: the time if everything else cost nothing;
* ``part=GPU idle``: wall time minus the time in which at least one kernel runs; the GPU then waits for the
  host. On a CPU, ``part=outside of operators``;
* ``part=kernels``: number of kernels.

As in ``scaling.py``, fairseq's Transformer is trained by fairseq's own ``Trainer``, with the plugin loaded.
"""

import argparse
import itertools
import re
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
from contenders import data_folder, training_flags
from fairseq.trainer import Trainer
from results import Run, add_common_flags, normalise_common_flags, positive
from steady import (
    BATCHES,
    build_trainer,
    free_memory,
    repeated,
    silence_logs,
    tokens_per_second,
    training_data,
)
from torch.autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

PARTS = {
    "attention": r"^_(forward|query|key)_kernel|attention|fmha|flash",
    "matrix products": r"gemm|nvjet|cutlass|splitk|cublas|aten::(add|b|badd)?mm$|mkldnn",
    "softmax and loss": r"softmax|nll_loss|label_smooth",
    "LayerNorm, residual, dropout": r"norm_(kernel|backward)|layer_?norm|GammaBeta|dropout|add_norm",
    "ReLU": r"relu|threshold|clamp",
    "optimizer": r"adam|multi_tensor|foreach|lpnorm",
    "sums": r"reduce_kernel|aten::sum",
    "copies": r"memcpy|memset|copy_|CatArray|aten::cat|fill",
    "indexing": r"index|gather|scatter|embedding",
}
"""Regular expressions for the names of kernels (on a CPU: of operators); the first match decides."""


class KernelRun(NamedTuple):
    """One run of a kernel; on a CPU, of an operator without the operators that it calls.

    Attributes:
        name: of the kernel.
        start: in microseconds.
        duration: in microseconds.
    """

    name: str
    start: float
    duration: float


def part_of(name: str) -> str:
    """Return the part of the table to which the kernel *name* belongs."""
    return next((part for part, names in PARTS.items() if re.search(names, name, re.IGNORECASE)), "other")


def milliseconds(kernels: Iterable[KernelRun]) -> dict[str, float]:
    """Return the sum of each part in milliseconds, the largest first."""
    sums: dict[str, float] = {}
    for kernel in kernels:
        part = part_of(kernel.name)
        sums[part] = sums.get(part, 0.0) + kernel.duration / 1e3
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def busy(kernels: Iterable[KernelRun]) -> float:
    """Return the milliseconds in which at least one of *kernels* runs."""
    total, until = 0.0, float("-inf")
    for _, start, duration in sorted(kernels, key=lambda kernel: kernel.start):
        end = start + duration
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def profile_kernels(trainer: Trainer, batches: Sequence[Any], passes: int, cpu: bool) -> list[KernelRun]:
    """Return all kernels that run in *passes* over *batches*."""
    with profile(activities=[ProfilerActivity.CPU if cpu else ProfilerActivity.CUDA]) as recorded:
        for samples in repeated(trainer, batches, passes):
            trainer.train_step(samples, raise_oom=True)
        if not cpu:
            torch.cuda.synchronize()
    device = DeviceType.CPU if cpu else DeviceType.CUDA
    return [
        KernelRun(
            event.name,
            event.time_range.start,
            event.self_cpu_time_total if cpu else event.time_range.elapsed_us(),
        )
        for event in recorded.events()
        if event.device_type == device
    ]


def measure(
    run: Run, contender: str, max_tokens: int, dtype: str, data: Path, args: argparse.Namespace
) -> None:
    """Profile one contender and add its rows."""
    flags = training_flags(
        *(contender, data),
        size="tiny" if args.quick else "base",
        max_tokens=max_tokens,
        dtype=dtype,
        workers=0,
        cpu=args.cpu,
    )
    flags += ["--distributed-world-size", "1"]

    trainer, batches = build_trainer(flags, max_tokens, training_data)
    tokens = sum(int(batch["ntokens"]) for batch in batches)
    speeds = tokens_per_second(trainer, batches, 1 if args.quick else 5, args.repeat, args.cpu)
    wall_time = 1e3 * tokens / statistics.median(speeds) / len(batches)
    kernels = profile_kernels(trainer, batches, args.repeat, args.cpu)
    updates = args.repeat * len(batches)
    setting = {"max_tokens": max_tokens, "dtype": dtype, "mode": "hard", "gpus": 1}

    def add(part: str, value: float, unit: str = "ms") -> None:
        run.add("profile", contender, {**setting, "part": part}, value, unit, updates)

    add("all", wall_time)
    add("kernels", len(kernels) / updates, "count")
    for part, value in milliseconds(kernels).items():
        add(part, value / updates)
    busy_time = sum(kernel.duration for kernel in kernels) / 1e3 if args.cpu else busy(kernels)
    add("outside of operators" if args.cpu else "GPU idle", max(0.0, wall_time - busy_time / updates))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="output of fairseq-preprocess")
    parser.add_argument(
        "--max-tokens", type=positive, nargs="+", metavar="N", help="tokens per batch; default: 16384 2048"
    )
    parser.add_argument(
        "--repeat", type=positive, metavar="N", help=f"passes over the {BATCHES} batches; default: 10"
    )
    add_common_flags(parser, "profile", contenders=("fairseq", "fast"))
    args = parser.parse_args()
    normalise_common_flags(args, "profile")
    args.repeat = args.repeat or (1 if args.quick else 10)
    sizes = args.max_tokens or ([512] if args.quick else [16384, 2048])

    silence_logs()
    run = Run("profile", args.out, args.cpu)
    with data_folder(args.data, args.quick) as data:
        for max_tokens, dtype, contender in itertools.product(sizes, args.dtype, args.contender):
            measure(run, contender, max_tokens, dtype, data, args)
            free_memory(args.cpu)
    run.print_table()


if __name__ == "__main__":
    main()
