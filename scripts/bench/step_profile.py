"""Table ``profile``: where the time of a training update goes, by what its kernels do.

    python scripts/bench/step_profile.py DATA-BIN     fp16, one GPU, 16,384 and 2,048 tokens
    python scripts/bench/step_profile.py --quick      tiny, on the CPU if there is no GPU

fairseq's trainer takes the same few real batches over and over, first with a clock, then under torch's
profiler. Milliseconds an update, the mean over all:

* ``part=all``: by the clock, without the profiler, which slows the host;
* ``part=matrix products`` and the like: sums over the kernels whose names say so (see ``PARTS``). Matrix
  products are the floor: what would be left if everything else cost nothing;
* ``part=GPU idle``: by the clock, less the time in which a kernel runs: the GPU waits for the host. On a CPU,
  ``part=outside of operators``.

``part=kernels``: how many they are. As in ``scaling.py``, fairseq's Transformer has the plugin loaded, too.
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
from results import Run, add_common_flags, positive, settle_common_flags
from steady import BATCHES, again_and_again, be_quiet, build, forget, rates, training_data
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
"""Regular expressions of kernels' (on a CPU operators') names; the first that is found decides."""


class Piece(NamedTuple):
    """One run of one kernel, or of one operator of the CPU without those that it calls."""

    name: str
    start: float
    """Microseconds."""
    duration: float
    """Microseconds."""


def part_of(name: str) -> str:
    """What the kernel *name* does."""
    return next((part for part, names in PARTS.items() if re.search(names, name, re.IGNORECASE)), "other")


def milliseconds(pieces: Iterable[Piece]) -> dict[str, float]:
    """The sum of each part that occurs, the largest first."""
    sums: dict[str, float] = {}
    for piece in pieces:
        part = part_of(piece.name)
        sums[part] = sums.get(part, 0.0) + piece.duration / 1e3
    return dict(sorted(sums.items(), key=lambda item: -item[1]))


def busy(pieces: Iterable[Piece]) -> float:
    """Milliseconds in which at least one of *pieces* runs."""
    total, until = 0.0, float("-inf")
    for _, start, duration in sorted(pieces, key=lambda piece: piece.start):
        end = start + duration
        total += max(0.0, end - max(start, until))
        until = max(until, end)
    return total / 1e3


def profiled(trainer: Trainer, batches: Sequence[Any], passes: int, cpu: bool) -> list[Piece]:
    """All that runs in *passes* over *batches*."""
    with profile(activities=[ProfilerActivity.CPU if cpu else ProfilerActivity.CUDA]) as recorded:
        for samples in again_and_again(batches, passes):
            trainer.train_step(samples, raise_oom=True)
        if not cpu:
            torch.cuda.synchronize()
    wanted = DeviceType.CPU if cpu else DeviceType.CUDA
    return [
        Piece(
            event.name,
            event.time_range.start,
            event.self_cpu_time_total if cpu else event.time_range.elapsed_us(),
        )
        for event in recorded.events()
        if event.device_type == wanted
    ]


def measure(
    run: Run, contender: str, max_tokens: int, dtype: str, data: Path, args: argparse.Namespace
) -> None:
    """Add the rows of one contender."""
    flags = training_flags(
        *(contender, data),
        size="tiny" if args.quick else "base",
        max_tokens=max_tokens,
        dtype=dtype,
        workers=0,
        cpu=args.cpu,
    )
    flags += ["--distributed-world-size", "1"]

    trainer, batches = build(flags, max_tokens, training_data)
    tokens = sum(int(batch["ntokens"]) for batch in batches)
    clocked = rates(trainer, batches, 1 if args.quick else 5, args.repeat, args.cpu)
    everything = 1e3 * tokens / statistics.median(clocked) / len(batches)
    pieces = profiled(trainer, batches, args.repeat, args.cpu)
    updates = args.repeat * len(batches)
    setting = {"max_tokens": max_tokens, "dtype": dtype, "mode": "hard", "gpus": 1}

    def add(part: str, value: float, unit: str = "ms") -> None:
        run.add("profile", contender, {**setting, "part": part}, value, unit, updates)

    add("all", everything)
    add("kernels", len(pieces) / updates, "count")
    for part, value in milliseconds(pieces).items():
        add(part, value / updates)
    working = sum(piece.duration for piece in pieces) / 1e3 if args.cpu else busy(pieces)
    add("outside of operators" if args.cpu else "GPU idle", max(0.0, everything - working / updates))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="of fairseq-preprocess")
    parser.add_argument(
        "--max-tokens", type=positive, nargs="+", metavar="N", help="a batch; default: 16384 2048"
    )
    parser.add_argument(
        "--repeat", type=positive, metavar="N", help=f"passes over the {BATCHES} batches; default: 10"
    )
    add_common_flags(parser, "profile", contenders=("fairseq", "fast"))
    args = parser.parse_args()
    settle_common_flags(args, "profile")
    args.repeat = args.repeat or (1 if args.quick else 10)
    sizes = args.max_tokens or ([512] if args.quick else [16384, 2048])

    be_quiet()
    run = Run("profile", args.out, args.cpu)
    with data_folder(args.data, args.quick) as data:
        for max_tokens, dtype, contender in itertools.product(sizes, args.dtype, args.contender):
            measure(run, contender, max_tokens, dtype, data, args)
            forget(args.cpu)
    run.print_table()


if __name__ == "__main__":
    main()
