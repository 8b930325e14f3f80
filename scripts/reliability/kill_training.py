"""Kill trainings at random moments, start them again, and compare where they end with one left alone.

    python scripts/reliability/kill_training.py                    # 200 kills, 40 of them while saving
    python scripts/reliability/kill_training.py --kills 10 --saving 3 --commands 0   # a short look

One small training (surface fusion, flat_adam, the fused criterion, CPU; several saves an epoch, a validation
at each, old checkpoints removed) runs without interruption. Then the same training is started in a new
folder, killed by SIGKILL, started again with the same flags, killed again ..., until a start reaches the end.
Then the folder must hold the same checkpoints as that of the uninterrupted run, bit for bit: parameters,
optimizer state, learning-rate schedule, place in the data, best value. Then the next folder, until there are
enough kills. Every start must go on: one that fails ends this script with status 1 and its log.

A kill comes

* ``any``: at a moment drawn uniformly over the duration of a whole training;
* ``saving``: a moment after a checkpoint's temporary file was seen.

A kill counts as "while saving" if it left a temporary file that was being written. Trainings without data
workers and with two take turns. Most are forked from this process, which has imported torch, fairseq and this
package but started nothing, so that a start takes a second; each is a process of its own. ``--commands`` of
the kills are of processes of the command ``surface-fusion train``.

Writes a CSV with a row a kill to ``-o`` and a summary beside it.
"""

import argparse
import csv
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

os.environ["OMP_NUM_THREADS"] = "1"  # before torch: a process with threads of its own must not fork

import torch
import torch.fx.experimental.symbolic_shapes  # which a training's first backward imports: seconds
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf

from surface_fusion.cli.main import main as surface_fusion
from surface_fusion.files import TEMPORARY, write_text

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
    """How the data is read: a key of ``SETTINGS``."""
    started: str
    """``fork`` or ``command``."""
    training: int
    """Number of the folder."""
    kill: int
    """Number of the kill, over all."""
    aimed: str
    """``any`` or ``saving``: how the moment was chosen."""
    seconds: float
    """From the start until the kill."""
    update: int
    """The last update that was logged."""
    writing: str
    """The file whose temporary file the kill left behind; empty if there is none."""
    next_start: str = ""
    """Where the next start went on."""


class Failure(Exception):
    """A start did not go on, or the end differs."""


class Process:
    """A training."""

    def __init__(self, argv: Sequence[str], log: Path, command: bool) -> None:
        self.log = log
        self.began = time.monotonic()
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
        """Whether it has, by itself or not."""
        if self.status is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.status = os.waitstatus_to_exitcode(status)
        return self.status is not None

    def wait(self) -> int:
        """Its exit status, when it has ended."""
        while not self.ended():
            time.sleep(0.02)
        assert self.status is not None
        return self.status

    def kill(self) -> bool:
        """SIGKILL to the training, not to its data workers; False if it had ended before."""
        if not self.ended():
            os.kill(self.pid, signal.SIGKILL)
        return self.wait() == -signal.SIGKILL

    def said(self) -> str:
        """Its log."""
        return self.log.read_text(encoding="utf-8", errors="replace")


def _train(argv: Sequence[str], out: int) -> None:
    """What a forked process does; never returns."""
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
    """Trainings of one setting, and the uninterrupted one that they are compared with."""

    def __init__(self, work: Path, data: Path, setting: str, command: bool, rng: random.Random) -> None:
        self.work, self.setting, self.command, self.rng = work, setting, command, rng
        self.argv = ["train", str(data), *TRAIN, *SETTINGS[setting], "--save-dir"]
        self.reference = self._folder("reference")
        whole = self._start(self.reference)
        if whole.wait() != 0:
            raise Failure(f"the uninterrupted training failed:\n{whole.said()[-3000:]}")
        self.duration = time.monotonic() - whole.began
        self.finished = 0

    def _folder(self, name: str) -> Path:
        return self.work / f"{self.setting} {'command' if self.command else 'fork'} {name}".replace(" ", "-")

    def _start(self, folder: Path) -> Process:
        return Process([*self.argv, str(folder)], folder.with_suffix(".log"), self.command)

    def kills(self, training: int, enough: Callable[[], bool]) -> Iterator[Kill]:
        """Start, kill and start again until the end is reached; then compare.

        Yields each kill when it is known where the next start went on. When there are *enough*, the next
        start is left alone.
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
                process.kill()  # where this script is interrupted
            if killed is None and process.status != 0:
                raise Failure(f"a start ended with status {process.status}:\n{process.said()[-3000:]}")
            if killed is not None and last_update(folder) == UPDATES:
                killed.next_start = "none: all was saved before the kill"
            if kill is not None:
                kill.next_start = where_it_went_on(process.said(), had_checkpoint)
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
        """Kill *process* at a random moment; None if it ended before that.

        Temporary files that were there *before* are of an earlier kill.
        """
        aimed = self.rng.choice(("any", "saving"))
        wait_until(process, folder, aimed, self.rng, self.duration)
        seconds = time.monotonic() - process.began
        if not process.kill():
            return None
        updates = re.findall(r'num_updates": "(\d+)"', process.said())
        left = {name: of for name, of in temporaries(folder).items() if name not in before}
        return Kill(
            setting=self.setting,
            started="command" if self.command else "fork",
            training=training,
            kill=0,
            aimed=aimed,
            seconds=round(seconds, 3),
            update=max(map(int, updates), default=0),
            writing=", ".join(sorted(left.values())),
        )


def wait_until(process: Process, folder: Path, aimed: str, rng: random.Random, duration: float) -> None:
    """Return at the moment of a kill, or when *process* has ended."""
    if aimed == "any":
        moment = process.began + rng.uniform(0, duration)
        while time.monotonic() < moment and not process.ended():
            time.sleep(0.005)
        return
    known, seen, wanted = set(temporaries(folder)), 0, rng.randint(1, 9)
    while seen < wanted and not process.ended():
        new = temporaries(folder).keys() - known
        seen += len(new)
        known |= new
        time.sleep(0.0005)
    time.sleep(rng.uniform(0, 0.004))


def temporaries(folder: Path) -> dict[str, str]:
    """Temporary files of checkpoints, and of which file each is."""
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return {}
    return {name: found[1] for name in names if (found := TEMPORARY.fullmatch(name))}


def last_update(folder: Path) -> int:
    """How many updates ``checkpoint_last.pt`` has behind it; 0 if there is none."""
    path = folder / "checkpoint_last.pt"
    if not path.exists():
        return 0
    return int(torch.load(path, mmap=True)["optimizer_history"][-1]["num_updates"])


def where_it_went_on(log: str, had_checkpoint: bool) -> str:
    """What a start said of the checkpoint that it went on from.

    Raises:
        Failure: it began anew although there was a checkpoint, or passed a damaged one over.
    """
    if "is damaged" in log or "is truncated" in log:
        raise Failure(f"a start found a damaged file:\n{log[-3000:]}")
    if loaded := re.search(r"Loaded checkpoint (\S+) \((epoch \d+ @ \d+ updates)\)", log):
        return f"{Path(loaded[1]).name}, {loaded[2]}"
    if "No existing checkpoint found" in log:
        if had_checkpoint:
            raise Failure(f"a start began anew although there was a checkpoint:\n{log[-3000:]}")
        return "from the beginning: there was no checkpoint_last.pt yet"
    return "killed before it said so"


def compare(reference: Path, folder: Path) -> None:
    """Raise :class:`Failure` unless both folders hold the same checkpoints.

    *folder* may also hold older ones, if they are whole: fairseq removes what the ``--keep-`` flags do not
    keep after a save in the middle of an epoch; who is killed before that removes it after the next.
    """
    expected, found = (sorted(os.listdir(place)) for place in (reference, folder))
    more = [name for name in found if name not in expected]
    if not set(expected) <= set(found) or not all(re.fullmatch(r"checkpoint.*\d\.pt", name) for name in more):
        raise Failure(f"files of the uninterrupted training: {expected}; of the killed one: {found}")
    for name in expected:
        one, other = (what_counts(torch.load(place / name)) for place in (reference, folder))
        if difference := first_difference(one, other, name):
            raise Failure(f"{difference} differs in {folder}")
    for name in more:
        torch.load(folder / name)


def what_counts(state: dict[str, Any]) -> dict[str, Any]:
    """A checkpoint without clocks and the name of its folder."""
    extra = state["extra_state"]
    return {
        "model": state["model"],
        "last_optimizer_state": state["last_optimizer_state"],
        "optimizer_history": state["optimizer_history"][-1],  # those before it are of each start
        **{name: extra[name] for name in ("best", "val_loss", "train_iterator")},
    }


def first_difference(one: Any, other: Any, name: str) -> Optional[str]:
    """Where two nested values differ; None if they do not."""
    if isinstance(one, torch.Tensor) and isinstance(other, torch.Tensor):
        same = one.dtype == other.dtype and one.shape == other.shape and one.equal(other)
        return None if same else name
    if isinstance(one, dict) and isinstance(other, dict):
        if one.keys() != other.keys():
            return name
        parts = ((one[key], other[key], f"{name} {key}") for key in one)
        return next((found for part in parts if (found := first_difference(*part))), None)
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)) and len(one) == len(other):
        parts = ((a, b, f"{name} {i}") for i, (a, b) in enumerate(zip(one, other, strict=True)))
        return next((found for part in parts if (found := first_difference(*part))), None)
    return None if type(one) is type(other) and one == other else name


def prepare(work: Path) -> Path:
    """Binarise some of the demo's text, in a process of its own."""
    for split, lines in LINES.items():
        for language in ("en", "ro"):
            text = (TEXT / f"{split}.{language}").read_text(encoding="utf-8").split("\n")[:lines]
            write_text(work / f"{split}.{language}", "\n".join(text) + "\n")
    data = work / "data-bin"
    argv = ["preprocess", "-s", "en", "-t", "ro", "--joined-dictionary", "--destdir", str(data)]
    argv += ["--trainpref", str(work / "train"), "--validpref", str(work / "valid")]
    process = Process(argv, work / "preprocess.log", command=False)
    if process.wait() != 0:
        raise Failure(process.said())
    return data


def save(out: Path, kills: Sequence[Kill], summary: str) -> None:
    """Write the table and the summary."""
    with tempfile.TemporaryFile("w+", encoding="utf-8", newline="") as text:
        writer = csv.DictWriter(text, [field.name for field in fields(Kill)], lineterminator="\n")
        writer.writeheader()
        writer.writerows(map(asdict, kills))
        text.seek(0)
        out.parent.mkdir(parents=True, exist_ok=True)
        write_text(out, text.read())
    write_text(out.with_suffix(".txt"), summary)


def in_words(kills: Sequence[Kill], experiments: Sequence[Experiment], seconds: float) -> str:
    """The summary."""
    lines = [
        f"{'setting':<12} {'started by':<10} kills  while saving  trainings that ended, all as uninterrupted"
    ]
    for e in experiments:
        started = "command" if e.command else "fork"
        of = [k for k in kills if (k.setting, k.started) == (e.setting, started)]
        saving = sum(bool(k.writing) for k in of)
        lines.append(f"{e.setting:<12} {started:<10} {len(of):>5}  {saving:>12}  {e.finished}")
    saving = sum(bool(k.writing) for k in kills)
    went_on = sum(" updates" in k.next_start for k in kills)
    lines.append(
        f"{len(kills)} kills, {saving} of them while saving, in {seconds:.0f} s; the next start went on from "
        f"a checkpoint {went_on} times, else began anew (none there yet) or was killed before it said so"
    )
    return "\n".join(lines) + "\n"


def run(args: argparse.Namespace, work: Path) -> None:
    """Kill until there were enough kills of each kind, and write the results."""
    began = time.monotonic()
    rng = random.Random(args.seed)
    data = prepare(work)
    logging.getLogger("hydra").setLevel(logging.WARNING)
    # hydra builds its parsers when it first reads a command line: a second of each start.
    convert_namespace_to_omegaconf(
        options.parse_args_and_arch(options.get_training_parser(), [str(data), *TRAIN])
    )
    kills: list[Kill] = []
    experiments = [Experiment(work, data, setting, False, rng) for setting in SETTINGS]
    by_command = [Experiment(work, data, s, True, rng) for s in SETTINGS] if args.commands else []

    def enough() -> bool:
        commands = sum(kill.started == "command" for kill in kills)
        saving = sum(bool(kill.writing) for kill in kills)
        return len(kills) >= args.kills and saving >= args.saving and commands >= args.commands

    for training in count(1):
        commands = sum(kill.started == "command" for kill in kills)
        turn = by_command if commands < args.commands else experiments
        for kill in turn[training % len(turn)].kills(training, enough):
            kills.append(kill)
            kill.kill = len(kills)
            print(*asdict(kill).values(), sep="\t", flush=True)
        save(args.out, kills, in_words(kills, [*experiments, *by_command], time.monotonic() - began))
        if enough():
            break
    print(args.out.with_suffix(".txt").read_text(encoding="utf-8"), end="")


def main() -> int:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--kills", type=int, default=200, metavar="N", help="at least; default: 200")
    parser.add_argument(
        "--saving", type=int, default=40, metavar="N", help="of them while saving; default: 40"
    )
    parser.add_argument(
        "--commands", type=int, default=20, metavar="N", help="of them by the command; default: 20"
    )
    parser.add_argument("--seed", type=int, default=1, help="of the moments; default: 1")
    parser.add_argument("-o", "--out", type=Path, default=RESULTS / "kills.csv", metavar="CSV")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="where trainings are kept; default: a new folder"
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
