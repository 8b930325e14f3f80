"""Print the progress of a training in short lines, from fairseq's JSON log on standard input.

    surface-fusion train ... --log-format json | python progress.py --updates 1240

Losses are negative log-likelihoods in bits per token, as in fairseq's log and the learning curve. For hard
fusion, whose probabilities sum to less than 1, they are normalised. Warnings and errors are printed
unchanged.
"""

import argparse
import json
import signal
import sys
from typing import Any


def progress(line: str, updates: int) -> str | None:
    """Return what to print for a *line* of the log of a training of *updates* updates.

    None for other lines, and for a line that was cut when the training was killed.
    """
    if " | WARNING | " in line or " | ERROR | " in line:
        return line.rstrip("\n")
    start = line.rfind('{"epoch": ')
    try:
        stats = json.loads(line[start:]) if start >= 0 else {}
    except json.JSONDecodeError:
        return None
    for prefix, name in (("", "training"), ("valid_", "validation")):
        if f"{prefix}nll_loss" in stats and f"{prefix}num_updates" in stats:
            done = int(stats[f"{prefix}num_updates"])
            loss = float(stats.get(f"{prefix}normalized_nll_loss", stats[f"{prefix}nll_loss"]))
            position = f"{done:{len(str(updates))}} of {updates} updates, epoch {stats['epoch']}"
            return f"{position}: {name} loss {loss:.2f}{_time_left(stats, updates - done)}"
    return None


def _time_left(stats: dict[str, Any], updates: int) -> str:
    """Estimate the remaining time from the speed of the last few updates."""
    speed = float(stats.get("ups", 0))
    if speed <= 0 or updates <= 0:
        return ""
    seconds = updates / speed
    return f", {seconds / 60:.0f} min left" if seconds > 90 else f", {seconds:.0f} s left"


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--updates", type=int, required=True, metavar="N", help="updates of the training")
    args = parser.parse_args()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C ends the training, and thus standard input
    for line in sys.stdin:
        if (text := progress(line, args.updates)) is not None:
            print(text, flush=True)


if __name__ == "__main__":
    main()
