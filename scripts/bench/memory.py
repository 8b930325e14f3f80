"""Table ``memory``: GPU memory of a training, and of output layer and loss alone.

    python scripts/bench/memory.py DATA-BIN           fp16, 16,384 tokens
    python scripts/bench/memory.py --quick            tiny, on the CPU if there is no GPU

* ``part=training``: memory that torch reserves in 150 updates of the training of ``train.py`` (on a CPU:
  resident memory of the process);
* ``part=loss``: peak memory of output layer and loss as in ``loss.py`` (only on a GPU).

``train.py`` and ``loss.py`` add such rows as well.
"""

import argparse
from itertools import product
from pathlib import Path

from contenders import SIZES, data_folder, training_flags
from loss import DTYPES, MODES, make_problem, peak_gib, step_of
from results import Run, add_common_flags, normalise_common_flags, positive
from train import timed_training


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="output of fairseq-preprocess")
    parser.add_argument("--max-tokens", type=positive, nargs="+", metavar="N", help="default: 16384")
    parser.add_argument("--size", choices=SIZES, help="size of the model; default: base, the README's")
    parser.add_argument("--updates", type=positive, metavar="N", help="default: 150")
    parser.add_argument(
        "--vocab", type=positive, default=35008, metavar="V", help="vocabulary of the loss; default: 35008"
    )
    add_common_flags(parser, "memory")
    args = parser.parse_args()
    normalise_common_flags(args, "memory")
    size = args.size or ("tiny" if args.quick else "base")
    updates = args.updates or (4 if args.quick else 150)
    batches = args.max_tokens or [800 if args.quick else 16384]

    run = Run("memory", args.out, args.cpu)
    with data_folder(args.data, args.quick) as data:
        for max_tokens, dtype, contender in product(batches, args.dtype, args.contender):
            flags = training_flags(
                *(contender, data),
                size=size,
                max_tokens=max_tokens,
                dtype=dtype,
                workers=0 if args.quick else 8,
                cpu=args.cpu,
            )
            record = timed_training([*flags, "--no-save"], cold=updates, steady=0, max_updates=updates)[0]
            setting = {"part": "training", "max_tokens": max_tokens, "dtype": dtype, "mode": "hard"}
            run.add("memory", contender, {**setting, "size": size}, record["peak_gib"], "GiB")
    for rows, dtype, mode in product(() if args.cpu else batches, args.dtype, MODES):
        problem = make_problem(rows, 512, args.vocab, DTYPES[dtype], "cuda")
        for contender in args.contender:
            step = step_of(contender, problem, mode)
            step()  # libraries allocate their workspaces in the first call
            setting = {"part": "loss", "rows": rows, "vocab": args.vocab, "dtype": dtype, "mode": mode}
            run.add("memory", contender, setting, peak_gib(step, problem), "GiB")
    run.print_table()


if __name__ == "__main__":
    main()
