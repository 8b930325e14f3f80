"""Kill trainings at random times, resume them, and compare the result with an uninterrupted run.

    python scripts/reliability/kill_training.py                    # 200 kills, 40 of them while saving
    python scripts/reliability/kill_training.py --kills 10 --saving 3 --commands 0   # a short run

A small training (surface fusion, flat_adam, the fused criterion, CPU; several saves per epoch, a validation
at each, old checkpoints removed) runs without interruption. The same training is then started in a new
folder, killed with SIGKILL and restarted with the same flags until a start reaches the end. The folder must
then hold the same checkpoints as that of the uninterrupted run, bit for bit: parameters, optimizer state,
learning-rate schedule, position in the data, best value. This is repeated with further folders until there
are enough kills. Every start must resume: if one fails, the script exits with status 1 and prints its log.

The time of a kill is chosen in one of two ways:

* ``any``: drawn uniformly over the duration of a whole training;
* ``saving``: shortly after a checkpoint's temporary file appears.

A kill counts as "while saving" if it left a temporary file that was being written. Trainings without data
workers and with two alternate. Most trainings are processes forked from this one, which has only imported
torch, fairseq and this package, so that a start takes a second. ``--commands`` sets how many kills are of the
command ``surface-fusion train``.

Writes a CSV with one row per kill to ``-o``, and a summary next to it.
"""

import argparse
import csv
import io
import logging
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, fields
from itertools import count
from pathlib import Path
from typing import Any, Optional

os.environ["OMP_NUM_THREADS"] = "1"  # before importing torch: a process with threads must not fork

import torch
import torch.fx.experimental.symbolic_shapes  # imported by the first backward otherwise, which takes seconds
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from surface_fusion.cli.main import main as surface_fusion
from surface_fusion.io.atomic_write import TEMPORARY, write_text

TEXT = Path(__file__).parents[1] / "demo" / "data"
RESULTS = Path(__file__).parent / "results"
LINES = {"train": 120, "valid": 16}

UPDATES = 24
TRAIN = (
    *("-a", "transformer_surface_fusion", "--surfacefusion", "att", "--sf-gate", "0.8", "--cpu"),
    *("--encoder-layers", "1", "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "128"),
    *("--decoder-layers", "1", "--decoder-embed-dim", "64", "--decoder-ffn-embed-dim", "128"),
    *("--encoder-attention-heads", "4", "--decoder-attention-heads", "4", "--share-all-embeddings"),
    *("--criterion", "fused_label_smoothed_cross_entropy", "--label-smoothing", "0.1", "--dropout", "0.1"),
    *("--optimizer", "flat_adam", "--lr", "0.002", "--clip-norm", "1.0"),
    *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", "8", "--max-tokens", "200"),
    *("--max-update", str(UPDATES)),
    *("--save-interval-updates", "3", "--log-format", "json", "--log-interval", "1", "--seed", "7"),
)
SETTINGS = {
    "no workers": ("--num-workers", "0", "--keep-interval-updates", "2", "--keep-last-epochs", "1"),
    "two workers": ("--num-workers", "2", "--keep-interval-updates", "1", "--keep-best-checkpoints", "2"),
}


@dataclass
class Kill:
    """A row of the CSV."""

    setting: str
    """Data workers and retention: a key of ``SETTINGS``."""
    started: str
    """``fork`` or ``command``."""
    training: int
    """Number of the folder."""
    kill: int
    """Number of the kill in the whole run."""
    aimed: str
    """``any`` or ``saving``: how the time was chosen."""
    seconds: float
    """Time from the start to the kill."""
    update: int
    """The last update that was logged."""
    writing: str
    """The file whose temporary file the kill left behind; empty if there is none."""
    next_start: str = ""
    """Where the next start resumed."""


class Failure(Exception):
    """A start did not resume, or the result differs."""


class Process:
    """A running training."""

    def __init__(self, argv: Sequence[str], log: Path, command: bool) -> None:
        self.log = log
        self.start = time.monotonic()
        with open(log, "wb") as out:
            if command:
                run = [sys.executable, "-m", "surface_fusion", *argv]
                self.pid = subprocess.Popen(run, stdout=out, stderr=out, start_new_session=True).pid
            else:
                self.pid = os.fork()
                if self.pid == 0:
                    _train(argv, out.fileno())
        self.status: Optional[int] = None

    def ended(self) -> bool:
        """Whether the training has exited or was killed."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def wait(self) -> int:
        """Wait until the training ends and return its exit status."""
        while not self.ended():
            time.sleep(0.02)
        assert self.status is not None
        return self.status

    def kill(self) -> bool:
        """Kill the training, but not its data workers, with SIGKILL; return False if it had ended before."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def output(self) -> str:
        """Return the log."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def _train(argv: Sequence[str], out: int) -> None:
    """Run a training in a forked process; never returns."""
    status = 70
    try:
        os.setsid()
        os.dup2(out, 1)
        os.dup2(out, 2)
        status = surface_fusion(list(argv))
        sys.stdout.flush()
    except BaseException:
        sys.excepthook(*sys.exc_info())
    finally:
        os._exit(status)


class Experiment:
    """Trainings with one setting, and the uninterrupted training to compare them with."""

    def __init__(self, work: Path, data: Path, setting: str, command: bool, rng: random.Random) -> None:
        self.work, self.setting, self.command, self.rng = work, setting, command, rng
        self.argv = ["train", str(data), *TRAIN, *SETTINGS[setting], "--save-dir"]
        self.reference = self._folder("reference")
        process = self._start(self.reference)
        if process.wait() != 0:
            raise Failure(f"the uninterrupted training failed:\n{process.output()[-3000:]}")
        self.duration = time.monotonic() - process.start
        self.finished = 0

    def _folder(self, name: str) -> Path:
        return self.work / f"{self.setting} {'command' if self.command else 'fork'} {name}".replace(" ", "-")

    def _start(self, folder: Path) -> Process:
        return Process([*self.argv, str(folder)], folder.with_suffix(".log"), self.command)

    def kills(self, training: int, enough: Callable[[], bool]) -> Iterator[Kill]:
        """Start, kill and restart a training until it reaches the end; then compare it.

        Yields each kill once it is known where the next start resumed. After *enough* kills, the next start
        is not killed.
        """
        folder = self._folder(str(training))
        kill: Optional[Kill] = None
        while True:
            had_checkpoint = (folder / "checkpoint_last.pt").exists()
            before = set(temporaries(folder))
            process = self._start(folder)
            try:
                killed = None if enough() else self._kill(process, folder, training, before)
                if killed is None:
                    process.wait()
            finally:
                process.kill()  # if this script is interrupted
            if killed is None and process.status != 0:
                raise Failure(f"a start ended with status {process.status}:\n{process.output()[-3000:]}")
            if killed is not None and last_update(folder) == UPDATES:
                killed.next_start = "none: all was saved before the kill"
            if kill is not None:
                kill.next_start = resumed_from(process.output(), had_checkpoint)
                yield kill
            kill = killed
            if kill is None or kill.next_start:
                break
        if kill is not None:
            yield kill
        compare(self.reference, folder)
        shutil.rmtree(folder)
        self.finished += 1

    def _kill(self, process: Process, folder: Path, training: int, before: set[str]) -> Optional[Kill]:
        """Kill *process* at a random time; return None if it ended before.

        Temporary files in *before* are of an earlier kill.
        """
        aimed = self.rng.choice(("any", "saving"))
        wait_until(process, folder, aimed, self.rng, self.duration)
        seconds = time.monotonic() - process.start
        if not process.kill():
            return None
        updates = re.findall(r'num_updates": "(\d+)"', process.output())
        left = [target for name, target in temporaries(folder).items() if name not in before]
        return Kill(
            setting=self.setting,
            started="command" if self.command else "fork",
            training=training,
            kill=0,
            aimed=aimed,
            seconds=round(seconds, 3),
            update=max(map(int, updates), default=0),
            writing=", ".join(sorted(left)),
        )


def wait_until(process: Process, folder: Path, aimed: str, rng: random.Random, duration: float) -> None:
    """Wait until the time of the kill, or until *process* has ended."""
    if aimed == "any":
        kill_time = process.start + rng.uniform(0, duration)
        while time.monotonic() < kill_time and not process.ended():
            time.sleep(0.005)
        return
    known, count_of_new, last = set(temporaries(folder)), 0, rng.randint(1, 9)
    while count_of_new < last and not process.ended():
        new = temporaries(folder).keys() - known
        count_of_new += len(new)
        known |= new
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.004))


def temporaries(folder: Path) -> dict[str, str]:
    """Map the temporary files of checkpoints to the files that they will replace."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    return {name: match[1] for name in names if (match := TEMPORARY.fullmatch(name))}


def last_update(folder: Path) -> int:
    """Return the number of updates of ``checkpoint_last.pt``; 0 if there is none."""
    path = folder / "checkpoint_last.pt"
    if not path.exists():
        return 0
    return int(torch.load(path, mmap=True)["optimizer_history"][-1]["num_updates"])


def resumed_from(log: str, had_checkpoint: bool) -> str:
    """Return what a start logged about the checkpoint from which it resumed.

    Raises:
        Failure: it started from scratch although there was a checkpoint, or skipped a damaged one.
    """
    if "is damaged" in log or "is truncated" in log:
        raise Failure(f"a start found a damaged file:\n{log[-3000:]}")
    if loaded := re.search(r"Loaded checkpoint (\S+) \((epoch \d+ @ \d+ updates)\)", log):
        return f"{Path(loaded[1]).name}, {loaded[2]}"
    if "No existing checkpoint found" in log:
        if had_checkpoint:
            raise Failure(f"a training started from scratch although it had a checkpoint:\n{log[-3000:]}")
        return "from the beginning: there was no checkpoint_last.pt yet"
    return "killed before it said so"


def compare(reference: Path, folder: Path) -> None:
    """Raise :class:`Failure` unless both folders hold the same checkpoints.

    *folder* may also hold older ones, if they are complete: after a save in the middle of an epoch, fairseq
    removes those that the ``--keep-`` flags do not keep. A training that is killed before removes them after
    the next save.
    """
    expected, actual = (sorted(os.listdir(path)) for path in (reference, folder))
    additional = [name for name in actual if name not in expected]
    all_checkpoints = all(re.fullmatch(r"checkpoint.*\d\.pt", name) for name in additional)
    if not set(expected) <= set(actual) or not all_checkpoints:
        raise Failure(f"files of the uninterrupted training: {expected}; of the killed one: {actual}")
    for name in expected:
        states = [compared_entries(torch.load(path / name)) for path in (reference, folder)]
        if difference := first_difference(*states, name):
            raise Failure(f"{difference} differs in {folder}")
    for name in additional:
        torch.load(folder / name)


def compared_entries(state: dict[str, Any]) -> dict[str, Any]:
    """Return the entries of a checkpoint except times and folder names."""
    extra = state["extra_state"]
    return {
        "model": state["model"],
        "last_optimizer_state": state["last_optimizer_state"],
        "optimizer_history": state["optimizer_history"][-1],  # earlier entries are added at each start
        **{name: extra[name] for name in ("best", "val_loss", "train_iterator")},
    }


def first_difference(a: Any, b: Any, name: str) -> Optional[str]:
    """Return where two nested values differ, as a path that begins with *name*; None if they are equal."""
    if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor):
        same = a.dtype == b.dtype and a.shape == b.shape and a.equal(b)
        return None if same else name
    if isinstance(a, dict) and isinstance(b, dict):
        if a.keys() != b.keys():
            return name
        pairs = ((a[key], b[key], f"{name} {key}") for key in a)
        return next(filter(None, (first_difference(*pair) for pair in pairs)), None)
    if isinstance(a, (list, tuple)) and isinstance(b, (list, tuple)) and len(a) == len(b):
        pairs = ((x, y, f"{name} {i}") for i, (x, y) in enumerate(zip(a, b, strict=True)))
        return next(filter(None, (first_difference(*pair) for pair in pairs)), None)
    return None if type(a) is type(b) and a == b else name


def prepare(work: Path) -> Path:
    """Binarise a part of the demo's text in a separate process."""
    for split, lines in LINES.items():
        for language in ("en", "ro"):
            text = (TEXT / f"{split}.{language}").read_text(encoding="utf-8").split("\n")[:lines]
            write_text(work / f"{split}.{language}", "\n".join(text) + "\n")
    data = work / "data-bin"
    argv = ["preprocess", "-s", "en", "-t", "ro", "--joined-dictionary", "--destdir", str(data)]
    argv += ["--trainpref", str(work / "train"), "--validpref", str(work / "valid")]
    process = Process(argv, work / "preprocess.log", command=False)
    if process.wait() != 0:
        raise Failure(process.output())
    return data


def save(out: Path, kills: Sequence[Kill], text: str) -> None:
    """Write the CSV, and *text* next to it."""
    table = io.StringIO()
    writer = csv.DictWriter(table, [field.name for field in fields(Kill)], lineterminator="\n")
    writer.writeheader()
    writer.writerows(map(asdict, kills))
    out.parent.mkdir(parents=True, exist_ok=True)
    write_text(out, table.getvalue())
    write_text(out.with_suffix(".txt"), text)


def summary(kills: Sequence[Kill], experiments: Sequence[Experiment], seconds: float) -> str:
    """Return a table with a row per experiment, and a line on all kills."""
    lines = [
        f"{'setting':<12} {'started by':<10} kills  while saving  trainings equal to an uninterrupted one"
    ]
    for experiment in experiments:
        started = "command" if experiment.command else "fork"
        selected = [kill for kill in kills if (kill.setting, kill.started) == (experiment.setting, started)]
        saving = sum(bool(kill.writing) for kill in selected)
        lines.append(
            f"{experiment.setting:<12} {started:<10} {len(selected):>5}  {saving:>12}  {experiment.finished}"
        )
    saving = sum(bool(kill.writing) for kill in kills)
    resumed = sum(" updates" in kill.next_start for kill in kills)
    lines.append(
        f"{len(kills)} kills, {saving} of them while saving, in {seconds:.0f} s; the next start resumed from "
        f"a checkpoint {resumed} times, otherwise there was none yet or it was killed before it logged one"
    )
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace, work: Path) -> None:
    """Kill trainings until there are enough kills of each kind, and write the results."""
    start = time.monotonic()
    rng = random.Random(args.seed)
    data = prepare(work)
    logging.getLogger("hydra").setLevel(logging.WARNING)
    # hydra builds its parsers when it first reads a command line, which would take a second per start.
    convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), [str(data), *TRAIN])
    )
    kills: list[Kill] = []
    experiments = [Experiment(work, data, setting, False, rng) for setting in SETTINGS]
    by_command = [Experiment(work, data, name, True, rng) for name in SETTINGS] if args.commands else []

    def enough() -> bool:
        commands = sum(kill.started == "command" for kill in kills)
        saving = sum(bool(kill.writing) for kill in kills)
        return len(kills) >= args.kills and saving >= args.saving and commands >= args.commands

    for training in count(1):
        commands = sum(kill.started == "command" for kill in kills)
        candidates = by_command if commands < args.commands else experiments
        for kill in candidates[training % len(candidates)].kills(training, enough):
            kills.append(kill)
            kill.kill = len(kills)
            print(*asdict(kill).values(), sep="\t", flush=True)
        save(args.out, kills, summary(kills, [*experiments, *by_command], time.monotonic() - start))
        if enough():
            break
    print(args.out.with_suffix(".txt").read_text(encoding="utf-8"), end="")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "--kills", type=int, default=200, metavar="N", help="minimum number of kills; default: 200"
    )
    parser.add_argument(
        "--saving", type=int, default=40, metavar="N", help="... of which during a save; default: 40"
    )
    parser.add_argument(
        "--commands",
        type=int,
        default=20,
        metavar="N",
        help="... of which started by the command; default: 20",
    )
    parser.add_argument("--seed", type=int, default=1, help="random seed; default: 1")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "kills.csv", metavar="CSV")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="folder for the trainings; default: a new folder"
    )
    args = parser.parse_args()
    if args.work is not None:
        args.work.mkdir(parents=True, exist_ok=True)
    work = Path(tempfile.mkdtemp(prefix="kill-training-", dir=args.work))
    try:
        run(args, work)
    except Failure as failure:
        print(f"kill_training.py: {failure}\n(kept: {work})", file=sys.stderr)
        return 1
    shutil.rmtree(work)
    return 0


if __name__ == "__main__":
    sys.exit(main())
