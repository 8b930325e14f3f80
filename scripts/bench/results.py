"""The measurements' table: one CSV in long format that every script of this folder appends to."""

import argparse
import csv
import io
import os
import platform
import secrets
import threading
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, Literal

import torch

RESULTS = Path(__file__).parent / "results"
CONTENDERS = ("fairseq", "plain", "fast")
"""fairseq's Transformer; surface fusion without, and with its fast paths."""


@dataclass(frozen=True)
class Row:
    """One measurement; the columns of the CSV."""

    run: str
    """What has the same id was measured in one run of one script."""
    table: str
    contender: str
    setting: str
    """``key=value;key=value``, see :func:`setting_of`."""
    value: float
    unit: str
    n: int
    """Measurements behind *value*, their median."""
    hardware: str
    torch: str
    date: str


COLUMNS = [column.name for column in fields(Row)]


def setting_of(settings: Mapping[str, object]) -> str:
    """*settings* in their order, as one cell."""
    return ";".join(f"{key}={value}" for key, value in settings.items())


def read_rows(path: Path) -> list[Row]:
    """All rows of a CSV of this kind.

    Raises:
        SystemExit: *path* is missing, or has other columns.
    """
    if not path.is_file():
        raise SystemExit(f"{path} is no file; give a CSV that one of these scripts wrote")
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            raise SystemExit(f"{path} has the columns {reader.fieldnames}, not {COLUMNS}; give another -o")
        converters: dict[str, Callable[[str], Any]] = {"value": float, "n": int}
        return [
            Row(**{name: converters.get(name, str)(cell) for name, cell in row.items()}) for row in reader
        ]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Add *rows* to the CSV at *path*, which is whole at any time: written beside it and renamed."""
    kept = read_rows(path) if path.exists() else []
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in [*kept, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    from surface_fusion.io.atomic_write import (
        write_text,  # not sooner: importing it changes fairseq, a contender
    )

    write_text(path, text.getvalue())


def machine(cpu: bool, device: int | None = None) -> dict[str, str]:
    """What a row says of where it was measured: GPU number *device* (None: the first), or the CPU's cores."""
    if cpu:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else platform.processor() or platform.machine()
        hardware = f"{name}, {len(os.sched_getaffinity(0))} cores"
    else:
        hardware = torch.cuda.get_device_name(device)
    return {"hardware": hardware, "torch": torch.__version__}


def together(names: Iterable[str]) -> str:
    """Different *names* as one cell, in the order in which they come."""
    return " + ".join(dict.fromkeys(names))


class Run:
    """One run of a script: gives its rows what they share, saves each at once, compares them at the end.

    Args:
        script: its name, the beginning of the run's id.
        out: the CSV, or None to save nothing.
        cpu: whether the CPU is measured.
    """

    def __init__(self, script: str, out: Path | None, cpu: bool) -> None:
        now = datetime.now(timezone.utc)
        self.id = f"{script}-{now:%Y%m%dT%H%M%S}-{secrets.token_hex(2)}"
        self.date = f"{now:%Y-%m-%d}"
        self.out = out
        self.machine = machine(cpu)
        self.rows: list[Row] = []
        self._lock = threading.Lock()
        if out is not None and out.exists():
            read_rows(out)  # complain now, not after the first measurement

    def add(
        self,
        table: str,
        contender: str,
        settings: Mapping[str, object],
        value: float,
        unit: str,
        n: int = 1,
        *,
        machine: Mapping[str, str] | None = None,
    ) -> None:
        """Keep, save and print one measurement, made on *machine* if that is not ours."""
        setting = setting_of(settings)
        shared = {**(machine or self.machine), "date": self.date}
        row = Row(self.id, table, contender, setting, float(f"{value:.6g}"), unit, n, **shared)
        with self._lock:
            self.rows.append(row)
            if self.out is not None:
                append_rows(self.out, [row])
        print(f"{table:8s}{contender:15s}{_rounded(value)} {unit:11s}{setting}  (n={n})", flush=True)

    def print_table(self) -> None:
        """One line for each setting: all contenders, and what each is relative to fairseq."""
        for text in comparison(self.rows):
            print(text)
        if self.out is not None:
            print(f"run {self.id}: {len(self.rows)} rows appended to {self.out}")


def comparison(rows: Iterable[Row]) -> list[str]:
    """Lines that set the contenders side by side; the first other than ``floor`` counts as 1.00 x."""
    cells: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row.table, row.unit, row.setting), {})[row.contender] = row.value
    names = [name for name in (*CONTENDERS, "floor") if any(name in found for found in cells.values())]
    lines, table = [], None
    for (now, unit, setting), found in sorted(cells.items(), key=lambda item: item[0][:2]):
        if (now, unit) != table:
            table = now, unit
            lines += ["", f"{now} ({unit})" + "".join(f"{name:>22s}" for name in names)]
        base = next((found[name] for name in CONTENDERS if name in found), None)
        line = f"{setting}\n" + " " * (len(now) + len(unit) + 3)
        for name in names:
            value = found.get(name)
            ratio = f"{value / base:.2f} x" if value is not None and base else ""
            line += f"{'-' if value is None else _rounded(value)}{ratio:>9s}".rjust(22)
        lines.append(line)
    return lines


def _rounded(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:12,.0f}"
    return f"{value:12.2f}" if abs(value) >= 0.01 else f"{value:12.1e}"


def positive(text: str) -> int:
    """A number on the command line of which there must be at least one."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number from 1")
    return int(text)


def probability(text: str) -> float:
    """A number on the command line from 0 up to below 1."""
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number from 0 up to below 1")
    return float(text)


def rate(text: str) -> float:
    """A number on the command line above 0."""
    if not float(text) > 0:
        raise argparse.ArgumentTypeError(f"{text}: give a number above 0")
    return float(text)


def add_common_flags(
    parser: argparse.ArgumentParser,
    name: str,
    *,
    contenders: Sequence[str] = CONTENDERS,
    dtypes: Literal["several", "one", "fp32"] = "several",
) -> None:
    """``-o``, ``--quick``, ``--cpu`` of every script; ``--dtype`` and ``--contender`` if there is a choice.

    Args:
        contenders: those compared unless the user names others; empty if there is nothing to name.
        dtypes: how many a run can have, or the only one.
    """
    parser.add_argument(
        "-o", "--out", type=Path, metavar="CSV", help=f"appended to (default: {RESULTS.name}/{name}.csv)"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: does it work? Saves only with -o")
    parser.add_argument("--cpu", action="store_true", help="measure the CPU although there is a GPU")
    if dtypes == "fp32":
        parser.set_defaults(dtype=[dtypes])
    else:
        parser.add_argument(
            "--dtype",
            nargs="+" if dtypes == "several" else 1,
            choices=("fp16", "bf16", "fp32"),
            help="default: fp16 on a GPU, fp32 on a CPU",
        )
    if contenders:
        parser.add_argument("--contender", nargs="+", choices=CONTENDERS, default=list(contenders))


def settle_common_flags(args: argparse.Namespace, name: str, *, trains: bool = True) -> None:
    """Fill in what was left to the machine, which *trains* something or does not."""
    args.cpu = args.cpu or not torch.cuda.is_available()
    args.dtype = args.dtype or ["fp32" if args.cpu else "fp16"]
    if trains and args.cpu and "fp16" in args.dtype:
        raise SystemExit("--dtype fp16 needs a CUDA GPU; leave it out, or give fp32")
    if args.out is None and not args.quick:
        args.out = RESULTS / f"{name}.csv"
