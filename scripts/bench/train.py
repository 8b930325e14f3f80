"""Tables ``train`` and ``memory``: speed and memory of trainings by fairseq's command line.

    python scripts/bench/train.py DATA-BIN                      fp16, one GPU, 16,384 and 2,048 tokens
    python scripts/bench/train.py DATA-BIN --gpus 1 2 --max-tokens 16384 --contender fast
    python scripts/bench/train.py --quick                       tiny, on the CPU if there is no GPU

Each contender trains the README's model (base, 6+6 layers of 512/2048, hard fusion, gate 0.8; fairseq: the
same Transformer without fusion) in a process of its own; that of fairseq does not load the plugin. Values are
target tokens per second, without padding:

* ``phase=cold``: the first 500 updates since the trainer was built, including all waiting, compilation and
  warm-up (``updates=`` is their number);
* ``phase=steady``: the median over windows of 40 updates, by wall time, once batches of all shapes have
  occurred (after 500 updates and 10 updates of the second epoch);
* ``phase=steady_within_epoch``: the same windows without the pauses at the start of epochs, in which fairseq
  starts its data workers; the speed in an epoch of many updates.

``memory`` is the GPU memory that torch reserves (on a CPU: resident memory), the maximum over processes.
"""

import argparse
import json
import math
import socket
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import torch
from contenders import SIZES, child_environment, data_folder, on_gpus, training_flags
from results import Run, add_common_flags, normalise_common_flags, positive

UNBOUNDED = 1_000_000
ON_GPU = ("--ddp-backend", "pytorch_ddp")
ON_CPU = ("--ddp-backend", "no_c10d", "--distributed-backend", "gloo")


def timed_training(
    flags: Sequence[str],
    *,
    gpus: int = 1,
    cold: int,
    steady: int,
    max_updates: int = UNBOUNDED,
    device: int | None = None,
    ablation: int | None = None,
) -> list[dict[str, Any]]:
    """Run ``timed_training.py``, one process per GPU.

    Args:
        flags: flags of the training.
        gpus: number of GPUs; on a CPU, number of processes.
        cold: number of cold updates.
        steady: number of updates in the steady state.
        max_updates: maximum number of updates.
        device: index of the only GPU to use.
        ablation: run ``ablated_training.py`` instead, with turns of this number of updates.

    Returns:
        The measurements of each process.

    Raises:
        SystemExit: a process failed; the message has the end of its output.
    """
    name = "timed_training.py" if ablation is None else "ablated_training.py"
    script = [str(Path(__file__).with_name(name)), *([] if ablation is None else [str(ablation)])]
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        outs = [Path(folder, f"{rank}.json") for rank in range(gpus)]
        logs = [Path(folder, f"{rank}.log") for rank in range(gpus)]
        distributed = ["--distributed-world-size", str(gpus)]
        if gpus > 1:
            distributed += ["--distributed-no-spawn"]
            distributed += ["--distributed-init-method", f"tcp://127.0.0.1:{free_port()}"]
            distributed += ON_CPU if "--cpu" in flags else ON_GPU
        processes = []
        for rank in range(gpus):
            rank_flags = ["--distributed-rank", str(rank), "--device-id", str(rank)] if gpus > 1 else []
            positional = [str(outs[rank]), str(cold), str(steady), str(max_updates)]
            save_dir = ["--save-dir", folder]  # fairseq creates one even with --no-save; flags override it
            command = [sys.executable, *script, *positional, *save_dir, *flags, *distributed, *rank_flags]
            with open(logs[rank], "w") as log:
                environment = child_environment(device, triton_cache=Path(folder, "triton"))
                processes.append(
                    subprocess.Popen(command, stdout=log, stderr=subprocess.STDOUT, env=environment)
                )
        wait_for_all(processes)
        for process, out, log_file in zip(processes, outs, logs, strict=True):
            if process.returncode or not out.exists():
                tail = log_file.read_text(errors="replace")[-4000:]
                raise SystemExit(f"a training ended with status {process.returncode}:\n{tail}")
        return [json.loads(out.read_text()) for out in outs]


def wait_for_all(processes: Sequence["subprocess.Popen[bytes]"]) -> None:
    """Wait for all processes; terminate the others if one fails, since they would wait for it forever."""
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() for process in processes):
                break
            for process in processes:
                try:
                    process.wait(timeout=1)
                except subprocess.TimeoutExpired:
                    break
    finally:
        for process in processes:
            if process.poll() is None:
                process.terminate()
                process.wait()


def free_port() -> int:
    """Return a TCP port of this machine that is not in use."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def coldrate(records: Sequence[dict[str, Any]], updates: int) -> tuple[float, int]:
    """Return tokens per second of the first *updates* updates, and their number, which may be lower."""
    n = min(updates, *(len(record["seconds"]) for record in records))
    return rate(records, 0, n, pauses=True), n


def steady_rates(records: Sequence[dict[str, Any]], window: int, pauses: bool) -> list[float]:
    """Return tokens per second in each complete window of the steady state; empty if it was not reached.

    Args:
        records: measurements of all processes.
        window: number of updates per window.
        pauses: whether to include the pauses at the start of epochs.
    """
    if any(record["steady_from"] is None for record in records):
        return []
    start = max(record["steady_from"] for record in records)
    end = min(len(record["seconds"]) for record in records)
    return [rate(records, i, i + window, pauses) for i in range(start, end - window + 1, window)]


def rate(records: Sequence[dict[str, Any]], first: int, last: int, pauses: bool) -> float:
    """Return the tokens of all processes in updates [first, last) per second of the slowest process."""
    times = []
    for record in records:
        time = record["seconds"][last - 1] - (record["seconds"][first - 1] if first else 0.0)
        if not pauses:
            time -= sum(seconds for updates, seconds in record["pauses"] if first <= updates < last)
        times.append(time)
    return math.fsum(sum(record["tokens"][first:last]) for record in records) / max(times)


def parse() -> argparse.Namespace:
    """Parse the command line and set the defaults that depend on it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="output of fairseq-preprocess")
    parser.add_argument(
        "--max-tokens", type=positive, nargs="+", metavar="N", help="tokens per GPU; default: 16384 2048"
    )
    parser.add_argument("--size", choices=SIZES, help="size of the model; default: base, the README's")
    parser.add_argument(
        "--gpus", type=positive, nargs="+", default=[1], metavar="N", help="on a CPU: processes; default: 1"
    )
    parser.add_argument("--cold", type=positive, metavar="N", help="updates that count as cold; default: 500")
    parser.add_argument("--window", type=positive, metavar="N", help="updates per steady window; default: 40")
    parser.add_argument("--windows", type=positive, metavar="N", help="steady windows; default: 5")
    parser.add_argument(
        "--updates",
        type=positive,
        default=UNBOUNDED,
        metavar="N",
        help="maximum number of updates, even if the steady state is not reached",
    )
    parser.add_argument(
        "--side-by-side", action="store_true", help="run several trainings at once, each on its own GPU"
    )
    add_common_flags(parser, "train")
    args = parser.parse_args()
    normalise_common_flags(args, "train")
    if not args.cpu and max(args.gpus) > torch.cuda.device_count():
        parser.error(f"--gpus {max(args.gpus)}: this machine has {torch.cuda.device_count()}")
    if args.side_by_side and (args.cpu or args.gpus != [1]):
        parser.error("--side-by-side needs --gpus 1 and a machine with several GPUs")
    args.cold = args.cold or (6 if args.quick else 500)
    args.window = args.window or (2 if args.quick else 40)
    args.windows = args.windows or (2 if args.quick else 5)
    args.size = args.size or ("tiny" if args.quick else "base")
    args.max_tokens = args.max_tokens or ([800] if args.quick else [16384, 2048])
    return args


def measure(
    run: Run,
    data: Path,
    args: argparse.Namespace,
    setting: tuple[int, int, str, str],
    device: int | None,
) -> None:
    """Train with *setting*: number of GPUs, tokens per GPU, dtype and contender; add the rows to *run*."""
    gpus, max_tokens, dtype, contender = setting
    flags = training_flags(
        *(contender, data),
        size=args.size,
        max_tokens=max_tokens,
        dtype=dtype,
        workers=0 if args.quick else 8,
        cpu=args.cpu,
    )
    records = timed_training(
        [*flags, "--no-save"],
        gpus=gpus,
        cold=args.cold,
        steady=args.window * args.windows,
        max_updates=args.updates,
        device=device,
    )
    columns = {"max_tokens": max_tokens, "dtype": dtype, "mode": "hard", "gpus": gpus}
    columns |= {"size": args.size} if args.size != "base" else {}
    columns["pairs"] = records[0]["pairs"]
    peak = max(record["peak_gib"] for record in records)
    run.add("memory", contender, {"part": "training", **columns}, peak, "GiB")
    speed, updates = coldrate(records, args.cold)
    run.add("train", contender, {**columns, "phase": "cold", "updates": updates}, speed, "tok/s")
    for phase, pauses in (("steady", True), ("steady_within_epoch", False)):
        speeds = steady_rates(records, args.window, pauses)
        if speeds:
            median = statistics.median(speeds)
            run.add("train", contender, {**columns, "phase": phase}, median, "tok/s", len(speeds))
        elif pauses:
            print(f"{contender}: the steady state was not reached within {args.updates} updates")


def main() -> None:
    """Entry point."""
    args = parse()
    run = Run("train", args.out, args.cpu)
    with data_folder(args.data, args.quick) as data:
        settings = product(args.gpus, args.max_tokens, args.dtype, args.contender)
        at_once = torch.cuda.device_count() if args.side_by_side else 1
        list(on_gpus(partial(measure, run, data, args), settings, at_once=at_once))
    run.print_table()


if __name__ == "__main__":
    main()
