"""Table ``scaling``: speed and memory of a training step by batch size, vocabulary and depth.

    python scripts/bench/scaling.py             some minutes; no data needed
    python scripts/bench/scaling.py --quick     tiny, on the CPU if there is no GPU

One of the three is varied, the others stay at 16,384 tokens, 32,000 entries and 6+6 layers of 512/2048. The
text is random: lengths are log-normal with a mean of 24, as in short news. The trainer repeats updates on the
same few batches, which measures the steady state. ``tok/s`` is the median over passes, ``GiB`` the memory
that torch reserves. A point that does not fit into the memory has no row.

The plugin is loaded for all contenders. fairseq's Transformer is trained by fairseq's own ``Trainer``
nevertheless; the plugin only repairs it (``surface_fusion/compat``). ``train.py`` measures it without the
plugin.
"""

import argparse
import itertools
import statistics
import sys
import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import torch
from contenders import training_flags
from fairseq.data import Dictionary, LanguagePairDataset
from results import Run, add_common_flags, normalise_common_flags, positive
from steady import BATCHES, build_trainer, free_memory, silence_logs, tokens_per_second

AXES = {
    "max_tokens": (1024, 2048, 4096, 8192, 16384, 32768, 65536),
    "vocab": (8000, 16000, 32000, 64000),
    "layers": (6, 12, 18, 24),
}
BASE = {"max_tokens": 16384, "vocab": 32000, "layers": 6}
QUICK_AXES = {"max_tokens": (256, 512), "vocab": (64, 128), "layers": (1, 2)}
QUICK_BASE = {"max_tokens": 256, "vocab": 64, "layers": 1}


def points(axes: dict[str, Sequence[int]], base: dict[str, int]) -> list[dict[str, int]]:
    """Return *base* with one value changed at a time; each point once, in the order of *axes*."""
    distinct = []
    for axis, values in axes.items():
        for value in values:
            point = {**base, axis: value}
            if point not in distinct:
                distinct.append(point)
    return distinct


def write_dictionaries(folder: Path, vocab: int) -> None:
    """Write two equal dictionaries of *vocab* entries, including the special symbols, to *folder*."""
    words = "".join(f"w{i} {vocab - i}\n" for i in range(Dictionary().nspecial, vocab))
    for language in ("en", "ro"):
        (folder / f"dict.{language}.txt").write_text(words, encoding="utf-8")


def random_pairs(task: Any, sentences: int) -> LanguagePairDataset:
    """Return pairs of random sentences; a target is at most a fifth longer or shorter than its source."""
    words = task.source_dictionary
    generator = torch.Generator().manual_seed(1)
    lengths = torch.empty(sentences).log_normal_(3.0, 0.6, generator=generator).clamp(2, 150)
    ratio = torch.empty(sentences).uniform_(0.8, 1.2, generator=generator)

    def side(lengths: torch.Tensor) -> tuple[list[torch.Tensor], list[int]]:
        sizes = lengths.int() + 1
        ids = torch.randint(words.nspecial, len(words), (int(sizes.sum()),), generator=generator)
        ids[sizes.cumsum(0) - 1] = words.eos()
        return list(ids.split(sizes.tolist())), sizes.tolist()

    source, source_sizes = side(lengths)
    target, target_sizes = side(lengths * ratio)
    return LanguagePairDataset(source, source_sizes, words, target, target_sizes, task.target_dictionary)


def measure(run: Run, contender: str, point: dict[str, int], dtype: str, args: argparse.Namespace) -> None:
    """Add the rows of one point; print a line if it does not fit into the memory."""
    with tempfile.TemporaryDirectory(prefix="bench-") as folder:
        write_dictionaries(Path(folder), point["vocab"])
        flags = training_flags(
            *(contender, Path(folder)),
            size="tiny" if args.quick else "base",
            max_tokens=point["max_tokens"],
            dtype=dtype,
            workers=0,
            cpu=args.cpu,
        )
        flags += ["-s", "en", "-t", "ro", "--distributed-world-size", "1"]
        for stack in ("encoder", "decoder"):
            flags += [f"--{stack}-layers", str(point["layers"])]
        sentences = BATCHES * point["max_tokens"] // 16 + 64
        dataset_of = partial(random_pairs, sentences=sentences)
        trainer, batches = build_trainer(flags, point["max_tokens"], dataset_of)
    setting = {**point, "dtype": dtype, "mode": "hard", "gpus": 1}
    try:
        speeds = tokens_per_second(trainer, batches, 1 if args.quick else 3, args.repeat, args.cpu)
    except torch.OutOfMemoryError:
        print(f"{contender} does not fit into the memory: {point}", file=sys.stderr)
        return
    run.add("scaling", contender, setting, statistics.median(speeds), "tok/s", len(speeds))
    if not args.cpu:
        run.add("scaling", contender, setting, torch.cuda.memory_reserved() / 2**30, "GiB")


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    for axis, values in AXES.items():
        name = "--" + axis.replace("_", "-")
        parser.add_argument(
            name, type=positive, nargs="*", metavar="N", help=f"default: {' '.join(map(str, values))}"
        )
    parser.add_argument(
        "--repeat", type=positive, metavar="N", help="timed passes over the batches; default: 5"
    )
    add_common_flags(parser, "scaling", contenders=("fairseq", "fast"))
    args = parser.parse_args()
    normalise_common_flags(args, "scaling")
    args.repeat = args.repeat or (2 if args.quick else 5)
    defaults, base = (QUICK_AXES, QUICK_BASE) if args.quick else (AXES, BASE)
    axes = {}
    for axis, values in defaults.items():
        chosen = getattr(args, axis)
        axes[axis] = values if chosen is None else chosen

    silence_logs()
    special = Dictionary().nspecial
    if any(vocab <= special for vocab in axes["vocab"]):
        parser.error(f"--vocab {min(axes['vocab'])}: {special} entries are special symbols; give more")
    run = Run("scaling", args.out, args.cpu)
    for point, dtype, contender in itertools.product(points(axes, base), args.dtype, args.contender):
        measure(run, contender, point, dtype, args)
        free_memory(args.cpu)
    run.print_table()


if __name__ == "__main__":
    main()
