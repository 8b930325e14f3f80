"""The CSV tables of measurements: all scripts of this folder append rows of this format."""

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

from surface_fusion.io.atomic_write import write_text

RESULTS = Path(__file__).parent / "results"
CONTENDERS = ("fairseq", "plain", "fast")
"""What is compared: fairseq's Transformer, surface fusion without the fast paths, and with them."""


@dataclass(frozen=True)
class Row:
    """One measurement; the columns of the CSV."""

    run: str
    """Id of the run of the script that measured it."""
    table: str
    contender: str
    setting: str
    """``key=value;key=value``, see :func:`setting_of`."""
    value: float
    unit: str
    n: int
    """Number of measurements; *value* is their median."""
    hardware: str
    torch: str
    date: str


COLUMNS = [column.name for column in fields(Row)]


def setting_of(settings: Mapping[str, object]) -> str:
    """Write *settings* as one cell, in their order."""
    return ";".join(f"{key}={value}" for key, value in settings.items())


def read_rows(path: Path) -> list[Row]:
    """Read the rows of the CSV at *path*.

    Raises:
        SystemExit: *path* does not exist or has other columns.
    """
    if not path.is_file():
        raise SystemExit(f"{path} is not a file; give a CSV that one of these scripts wrote")
    with open(path, encoding="utf-8", newline="") as file:
        reader = csv.DictReader(file)
        if reader.fieldnames != COLUMNS:
            raise SystemExit(f"{path} has the columns {reader.fieldnames}, not {COLUMNS}; give another -o")
        converters: dict[str, Callable[[str], Any]] = {"value": float, "n": int}
        return [
            Row(**{name: converters.get(name, str)(cell) for name, cell in row.items()}) for row in reader
        ]


def append_rows(path: Path, rows: Iterable[Row]) -> None:
    """Append *rows* to the CSV at *path* atomically."""
    earlier = read_rows(path) if path.exists() else []
    text = io.StringIO()
    writer = csv.DictWriter(text, COLUMNS, lineterminator="\n")
    writer.writeheader()
    writer.writerows(asdict(row) for row in [*earlier, *rows])
    path.parent.mkdir(parents=True, exist_ok=True)
    write_text(path, text.getvalue())


def machine(cpu: bool, device: int | None = None) -> dict[str, str]:
    """Describe this machine for a row: GPU number *device* (None: the first), or the CPU and its cores."""
    if cpu:
        cpuinfo = Path("/proc/cpuinfo")
        lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
        names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
        name = names[0] if names else platform.processor() or platform.machine()
        hardware = f"{name}, {len(os.sched_getaffinity(0))} cores"
    else:
        hardware = torch.cuda.get_device_name(device)
    return {"hardware": hardware, "torch": torch.__version__}


def join_names(names: Iterable[str]) -> str:
    """Join the distinct *names* to one cell, in order of first appearance."""
    return " + ".join(dict.fromkeys(names))


class Run:
    """One run of a script: saves each row when it is measured, and compares the rows at the end.

    Args:
        script: name of the script, the beginning of the run's id.
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
            read_rows(out)  # raises for a wrong file before the first measurement

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
        """Save and print one measurement.

        Args:
            table: name of the table.
            contender: what was measured.
            settings: with which settings.
            value: the median of the measurements.
            unit: of *value*.
            n: number of measurements.
            machine: where it was measured; default: this machine.
        """
        setting = setting_of(settings)
        shared = {**(machine or self.machine), "date": self.date}
        row = Row(self.id, table, contender, setting, float(f"{value:.6g}"), unit, n, **shared)
        with self._lock:
            self.rows.append(row)
            if self.out is not None:
                append_rows(self.out, [row])
        print(f"{table:8s}{contender:15s}{_rounded(value)} {unit:11s}{setting}  (n={n})", flush=True)

    def print_table(self) -> None:
        """Print the values of all contenders for each setting, and their ratios to fairseq's."""
        for line in comparison(self.rows):
            print(line)
        if self.out is not None:
            print(f"run {self.id}: {len(self.rows)} rows appended to {self.out}")


def comparison(rows: Iterable[Row]) -> list[str]:
    """Format a table with a column per contender; ratios are to the first one other than ``floor``."""
    cells: dict[tuple[str, str, str], dict[str, float]] = {}
    for row in rows:
        cells.setdefault((row.table, row.unit, row.setting), {})[row.contender] = row.value
    names = [name for name in (*CONTENDERS, "floor") if any(name in values for values in cells.values())]
    lines, heading = [], None
    for (table, unit, setting), values in sorted(cells.items(), key=lambda item: item[0][:2]):
        if (table, unit) != heading:
            heading = table, unit
            lines += ["", f"{table} ({unit})" + "".join(f"{name:>22s}" for name in names)]
        base = next((values[name] for name in CONTENDERS if name in values), None)
        line = f"{setting}\n" + " " * (len(table) + len(unit) + 3)
        for name in names:
            value = values.get(name)
            ratio = f"{value / base:.2f} x" if value is not None and base else ""
            line += f"{'-' if value is None else _rounded(value)}{ratio:>9s}".rjust(22)
        lines.append(line)
    return lines


def _rounded(value: float) -> str:
    if abs(value) >= 1000:
        return f"{value:12,.0f}"
    return f"{value:12.2f}" if abs(value) >= 0.01 else f"{value:12.1e}"


def positive(text: str) -> int:
    """Parse an integer of the command line that is at least 1."""
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a whole number of at least 1")
    return int(text)


def probability(text: str) -> float:
    """Parse a number of the command line in [0, 1)."""
    if not 0 <= float(text) < 1:
        raise argparse.ArgumentTypeError(f"{text}: give a number in [0, 1)")
    return float(text)


def learning_rate(text: str) -> float:
    """Parse a number of the command line above 0."""
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
    """Add the flags of every script: ``-o``, ``--quick``, ``--cpu``, ``--dtype`` and ``--contender``.

    Args:
        parser: the script's parser.
        name: the script's table.
        contenders: default of ``--contender``; if empty, the script has no such flag.
        dtypes: how many values ``--dtype`` takes; ``fp32`` if the script has no such flag.
    """
    parser.add_argument(
        "-o", "--out", type=Path, metavar="CSV", help=f"file to append to; default: {RESULTS.name}/{name}.csv"
    )
    parser.add_argument(
        "--quick", action="store_true", help="tiny sizes, to test the script; saves nothing without -o"
    )
    parser.add_argument("--cpu", action="store_true", help="use the CPU even if a GPU is available")
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


def normalise_common_flags(args: argparse.Namespace, name: str, *, trains: bool = True) -> None:
    """Set the defaults that depend on the machine; *trains*: whether the script trains a model."""
    args.cpu = args.cpu or not torch.cuda.is_available()
    args.dtype = args.dtype or ["fp32" if args.cpu else "fp16"]
    if trains and args.cpu and "fp16" in args.dtype:
        raise SystemExit("--dtype fp16 needs a CUDA GPU; leave it out, or give fp32")
    if args.out is None and not args.quick:
        args.out = RESULTS / f"{name}.csv"
