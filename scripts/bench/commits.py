"""Table ``commits``: speed of training or decoding in several checkouts, measured in turn on one machine.

    git worktree add ../before COMMIT
    python scripts/bench/commits.py before=../before after=. --repeat 3
    python scripts/bench/commits.py before=../before after=. --data DATA-BIN
    python scripts/bench/commits.py before=../before after=. --data DATA-BIN --decode CHECKPOINT

Each round runs one script of every checkout, each in its own process, so that a change of the machine's speed
affects all checkouts equally: ``scaling.py --contender fast`` on random text, or with ``--data`` the command
line of fairseq by ``train.py --contender fast``, which includes data workers and logging, with ``--decode``
``decode.py --contender fast --length 20``. ``tok/s`` is the median over rounds of target tokens per second in
the steady state.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path

from results import Run, add_common_flags, normalise_common_flags, positive, read_rows


def checkout(text: str) -> tuple[str, Path]:
    """Parse NAME=FOLDER of the command line."""
    name, _, folder = text.partition("=")
    path = Path(folder).resolve()
    if not name or not (path / "scripts/bench/scaling.py").is_file():
        raise argparse.ArgumentTypeError(
            f"{text}: give NAME=FOLDER, where FOLDER has scripts/bench/scaling.py"
        )
    return name, path


def measure(folder: Path, args: argparse.Namespace) -> dict[str, float]:
    """Measure target tokens per second of the checkout in *folder*, by setting."""
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        out = Path(temporary, "out.csv")
        script = ["scaling.py", "--vocab", "--layers"] if args.data is None else ["train.py", str(args.data)]
        flags = ["--max-tokens", *map(str, args.max_tokens)]
        if args.decode is not None:
            script = ["decode.py", str(args.data), "--path", str(args.decode)]
            flags = ["--length", "8" if args.quick else "20"]
        command = [sys.executable, folder / "scripts/bench" / script[0], *script[1:], *flags]
        command += ["--contender", "fast", "-o", out, "--dtype", *args.dtype]
        command += [flag for flag in ("--quick", "--cpu") if getattr(args, flag[2:])]
        environment = {**os.environ, "PYTHONPATH": f"{folder}:{os.environ.get('PYTHONPATH', '')}"}
        subprocess.run(command, env=environment, stdout=subprocess.DEVNULL, check=True)
        rows = [row for row in read_rows(out) if row.unit == "tok/s" and "phase=cold" not in row.setting]
        return {row.setting: row.value for row in rows}


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("checkouts", type=checkout, nargs="+", metavar="NAME=FOLDER")
    parser.add_argument("--max-tokens", type=positive, nargs="+", metavar="N", default=[2048, 16384])
    parser.add_argument("--data", type=Path, metavar="DATA-BIN", help="train by fairseq's command line on it")
    parser.add_argument(
        "--decode", type=Path, metavar="CHECKPOINT", help="decode the test set of --data instead of training"
    )
    parser.add_argument("--repeat", type=positive, metavar="N", default=3, help="rounds; default: 3")
    add_common_flags(parser, "commits", contenders=())
    args = parser.parse_args()
    normalise_common_flags(args, "commits")
    if args.decode is not None and args.data is None:
        parser.error("--decode needs --data")

    run = Run("commits", args.out, args.cpu)
    speeds: dict[tuple[str, str], list[float]] = {}
    for _ in range(args.repeat):
        for name, folder in args.checkouts:
            for setting, speed in measure(folder, args).items():
                speeds.setdefault((setting, name), []).append(speed)
    first = args.checkouts[0][0]
    for (setting, name), values in sorted(speeds.items()):
        median = statistics.median(values)
        settings = dict(part.split("=", 1) for part in setting.split(";"))
        run.add("commits", name, settings, median, "tok/s", len(values))
        ratio = median / statistics.median(speeds[setting, first])
        print(f"{name} / {first}: {ratio:.3f}   ({', '.join(f'{value:,.0f}' for value in values)})")


if __name__ == "__main__":
    main()
