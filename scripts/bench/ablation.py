"""Table ``ablation``: speed of training with one optimisation of the trainer off at a time.

    python scripts/bench/ablation.py DATA-BIN                    one GPU, 16,384 and 2,048 tokens
    python scripts/bench/ablation.py DATA-BIN --gpus 2 --max-tokens 16384
    python scripts/bench/ablation.py --quick                     tiny, on the CPU if there is no GPU

One training by fairseq's command line per setting. Every 20 updates the next variant takes its turn
(``ablated_training.py`` names them), so that all of them see the same machine and the same kind of batches.
``tok/s`` is the median over the variant's turns in the steady state, without their first 5 updates and
without the pauses at the start of epochs. An optimisation is worth keeping if ``off=none`` is at least 2 %
faster than the variant without it.
"""

import argparse
import statistics
from pathlib import Path
from typing import Any

from ablated_training import VARIANTS
from contenders import data_folder, training_flags
from results import Run, add_common_flags, normalise_common_flags, positive
from train import rate, timed_training

SETTLING = 5
"""Updates at the start of a turn that are not counted."""


def speeds(records: list[dict[str, Any]], window: int) -> dict[str, list[float]]:
    """Return tokens per second in each complete turn of the steady state, by variant."""
    start = max(record["steady_from"] for record in records)
    end = min(len(record["seconds"]) for record in records)
    first = -(-start // window) * window
    names = list(VARIANTS)
    result: dict[str, list[float]] = {name: [] for name in names}
    for i in range(first, end - window + 1, window):
        speed = rate(records, i + min(SETTLING, window - 1), i + window, pauses=False)
        result[names[i // window % len(names)]].append(speed)
    return result


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="output of fairseq-preprocess")
    parser.add_argument("--max-tokens", type=positive, nargs="+", metavar="N", help="default: 16384 2048")
    parser.add_argument("--gpus", type=positive, default=1, metavar="N", help="default: 1")
    parser.add_argument("--turns", type=positive, metavar="N", help="turns of each variant; default: 12")
    add_common_flags(parser, "ablation", contenders=())
    args = parser.parse_args()
    normalise_common_flags(args, "ablation")
    turns, window, cold = (args.turns or 1, 2, 4) if args.quick else (args.turns or 12, 20, 500)
    run = Run("ablation", args.out, args.cpu)
    with data_folder(args.data, args.quick) as data:
        for max_tokens in args.max_tokens or ([800] if args.quick else [16384, 2048]):
            for dtype in args.dtype:
                flags = training_flags(
                    *("fast", data),
                    size="tiny" if args.quick else "base",
                    max_tokens=max_tokens,
                    dtype=dtype,
                    workers=0 if args.quick else 8,
                    cpu=args.cpu,
                )
                steady = (turns * len(VARIANTS) + 1) * window
                records = timed_training(
                    [*flags, "--no-save"], gpus=args.gpus, cold=cold, steady=steady, ablation=window
                )
                for name, values in speeds(records, window).items():
                    setting = {"max_tokens": max_tokens, "dtype": dtype, "gpus": args.gpus, "off": name}
                    run.add("ablation", "fast", setting, statistics.median(values), "tok/s", len(values))
    run.print_table()


if __name__ == "__main__":
    main()
