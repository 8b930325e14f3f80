"""Tables ``train`` and ``memory``: real trainings by fairseq's command line, with a clock.

    python scripts/bench/train.py DATA-BIN                      fp16, one GPU, 16,384 and 2,048 tokens
    python scripts/bench/train.py DATA-BIN --gpus 1 2 --max-tokens 16384 --contender fast
    python scripts/bench/train.py --quick                       tiny, on the CPU if there is no GPU

Each contender trains the README's model (base, 6+6 layers of 512/2048, hard fusion, gate 0.8; fairseq: the
same Transformer without fusion) in a process of its own. Target tokens a second, without padding:

* ``phase=cold``: the first 500 updates since the trainer was built, all waiting, compilation and warm-up
  included (``updates=`` says how many they were);
* ``phase=steady``: after every shape of batch has been seen (500 updates, and 10 of the second epoch), the
  median over windows of 40 updates of wall time;
* ``phase=steady_within_epoch``: the same windows without the pauses in which fairseq starts its data workers
  again, once an epoch: what is left of them in an epoch of many updates.

``memory``: GPU memory that a process took from the driver (on a CPU: its resident memory), the most of all.
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
from itertools import product
from pathlib import Path
from typing import Any

import torch
from contenders import SIZES, child_environment, data_folder, on_gpus, training_flags
from results import Run, add_common_flags, positive, settle_common_flags

UNBOUNDED = 1_000_000
ON_GPU = ("--ddp-backend", "pytorch_ddp")
ON_CPU = ("--ddp-backend", "no_c10d", "--distributed-backend", "gloo")


def timed_training(
    flags: Sequence[str],
    *,
    gpus: int = 1,
    cold: int,
    steady: int,
    most: int = UNBOUNDED,
    device: int | None = None,
) -> list[dict[str, Any]]:
    """Run ``timed_training.py``, one process a GPU; on GPU number *device* alone, if that is given.

    Returns:
        What it recorded, for each process.

    Raises:
        SystemExit: a process failed; with the end of its output.
    """
    script = str(Path(__file__).with_name("timed_training.py"))
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        outs = [Path(folder, f"{rank}.json") for rank in range(gpus)]
        logs = [Path(folder, f"{rank}.log") for rank in range(gpus)]
        together = ["--distributed-world-size", str(gpus)]
        if gpus > 1:
            together += ["--distributed-no-spawn"]
            together += ["--distributed-init-method", f"tcp://127.0.0.1:{free_port()}"]
            together += ON_CPU if "--cpu" in flags else ON_GPU
        processes = []
        for rank in range(gpus):
            own = ["--distributed-rank", str(rank), "--device-id", str(rank)] if gpus > 1 else []
            limits = [str(outs[rank]), str(cold), str(steady), str(most)]
            place = ["--save-dir", folder]  # fairseq makes it in any case; flags may name another
            command = [sys.executable, script, *limits, *place, *flags, *together, *own]
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
    """Wait; when one fails, or we do, end the others, which would wait for it forever."""
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
    """A TCP port of this machine that nobody uses now."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        port: int = server.getsockname()[1]
        return port


def cold_rate(records: Sequence[dict[str, Any]], updates: int) -> tuple[float, int]:
    """Tokens a second of the first *updates* updates (all, if there are fewer), and how many they were."""
    n = min(updates, *(len(record["seconds"]) for record in records))
    return _rate(records, 0, n, pauses=True), n


def steady_rates(records: Sequence[dict[str, Any]], window: int, pauses: bool) -> list[float]:
    """Tokens a second in each whole window of the steady state; none if it was not reached.

    Args:
        records: of all processes.
        window: its length in updates.
        pauses: whether the starts of epochs count.
    """
    if any(record["steady_from"] is None for record in records):
        return []
    start = max(record["steady_from"] for record in records)
    end = min(len(record["seconds"]) for record in records)
    return [_rate(records, i, i + window, pauses) for i in range(start, end - window + 1, window)]


def _rate(records: Sequence[dict[str, Any]], first: int, last: int, pauses: bool) -> float:
    """Tokens of all processes in updates [first, last) over the time of the slowest."""
    times = []
    for record in records:
        time = record["seconds"][last - 1] - (record["seconds"][first - 1] if first else 0.0)
        if not pauses:
            time -= sum(seconds for updates, seconds in record["pauses"] if first <= updates < last)
        times.append(time)
    return math.fsum(sum(record["tokens"][first:last]) for record in records) / max(times)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="of fairseq-preprocess")
    parser.add_argument(
        "--max-tokens", type=positive, nargs="+", metavar="N", help="a GPU; default: 16384 2048"
    )
    parser.add_argument("--size", choices=SIZES, help="of the model; default: base, the README's")
    parser.add_argument(
        "--gpus", type=positive, nargs="+", default=[1], metavar="N", help="on a CPU: processes; default: 1"
    )
    parser.add_argument("--cold", type=positive, metavar="N", help="updates that count as cold; default: 500")
    parser.add_argument(
        "--window", type=positive, metavar="N", help="updates of a steady window; default: 40"
    )
    parser.add_argument("--windows", type=positive, metavar="N", help="steady windows; default: 5")
    parser.add_argument(
        "--updates",
        type=positive,
        default=UNBOUNDED,
        metavar="N",
        help="train no longer than this, steady or not",
    )
    parser.add_argument(
        "--side-by-side", action="store_true", help="several trainings at once, each on a GPU of its own"
    )
    add_common_flags(parser, "train")
    args = parser.parse_args()
    settle_common_flags(args, "train")
    if not args.cpu and max(args.gpus) > torch.cuda.device_count():
        parser.error(f"--gpus {max(args.gpus)}: this machine has {torch.cuda.device_count()}")
    if args.side_by_side and (args.cpu or args.gpus != [1]):
        parser.error("--side-by-side is for trainings of one GPU each, on a machine with several")
    cold = args.cold or (6 if args.quick else 500)
    window = args.window or (2 if args.quick else 40)
    windows = args.windows or (2 if args.quick else 5)
    size = args.size or ("tiny" if args.quick else "base")
    batches = args.max_tokens or ([800] if args.quick else [16384, 2048])

    run = Run("train", args.out, args.cpu)
    with data_folder(args.data, args.quick) as data:

        def measure(trained: tuple[int, int, str, str], device: int | None) -> None:
            gpus, max_tokens, dtype, contender = trained
            flags = training_flags(
                *(contender, data),
                size=size,
                max_tokens=max_tokens,
                dtype=dtype,
                workers=0 if args.quick else 8,
                cpu=args.cpu,
            )
            limits = {"cold": cold, "steady": window * windows, "most": args.updates}
            records = timed_training([*flags, "--no-save"], gpus=gpus, device=device, **limits)
            setting = {"max_tokens": max_tokens, "dtype": dtype, "mode": "hard", "gpus": gpus}
            setting |= {"size": size} if size != "base" else {}
            setting["pairs"] = records[0]["pairs"]
            peak = max(record["peak_gib"] for record in records)
            run.add("memory", contender, {"part": "training", **setting}, peak, "GiB")
            rate, n = cold_rate(records, cold)
            run.add("train", contender, {**setting, "phase": "cold", "updates": n}, rate, "tok/s")
            for phase, pauses in (("steady", True), ("steady_within_epoch", False)):
                rates = steady_rates(records, window, pauses)
                if rates:
                    value = statistics.median(rates)
                    run.add("train", contender, {**setting, "phase": phase}, value, "tok/s", len(rates))
                elif pauses:
                    print(f"{contender}: the steady state did not begin within {args.updates} updates")

        settings = product(args.gpus, batches, args.dtype, args.contender)
        at_once = torch.cuda.device_count() if args.side_by_side else 1
        list(on_gpus(measure, settings, at_once=at_once))
    run.print_table()


if __name__ == "__main__":
    main()
