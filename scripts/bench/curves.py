"""Table ``curves``: difference between the losses of the fast and the plain path in a real training, in fp32.

    python scripts/bench/curves.py DATA-BIN [--updates 500] [--size demo]
    python scripts/bench/curves.py --quick            tiny, on the CPU if there is no GPU

There are four trainings with the same data, seed and flags, without dropout: each path (``plain``, ``fast``)
with the sentences of each batch in their order (``straight``) and in reverse (``reversed``), which changes
only the order of summation. Rounding errors grow during training, so that even ``plain`` differs from
``plain``, reversed. The fast path is correct if its difference is not larger than that. Values are the
largest relative difference from ``plain`` in the loss of an update, up to update 20, 100, 200 and so on.
"""

import argparse
import json
import sys
import tempfile
from itertools import product
from pathlib import Path
from typing import Any

from contenders import SIZES, child_environment, data_folder, on_gpus, output_of, training_flags
from results import Run, add_common_flags, normalise_common_flags, positive

CHECKPOINTS = (20, 100, 200, 300, 400, 500)
FIXED = (
    *("--dropout", "0", "--attention-dropout", "0", "--no-save"),
    *("--warmup-updates", "100", "--clip-norm", "1"),
)


def train(out: Path, reverse: bool, flags: list[str]) -> None:
    """Train in this process and write the loss per token of each update to *out* as JSON."""
    from fairseq.tasks import FairseqTask
    from fairseq.trainer import Trainer
    from fairseq_cli.train import cli_main

    losses: list[float] = []
    task_step, trainer_step = FairseqTask.train_step, Trainer.train_step
    batch_loss: list[float] = []

    def recording_task_step(task: Any, sample: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        if reverse:
            inputs = sample["net_input"]
            flipped = {
                name: inputs[name].flip(0) for name in ("src_tokens", "src_lengths", "prev_output_tokens")
            }
            sample = {**sample, "net_input": {**inputs, **flipped}, "target": sample["target"].flip(0)}
        result = task_step(task, sample, *args, **kwargs)
        batch_loss[:] = [float(result[0].detach().double() / float(result[1]))]
        return result

    def recording_trainer_step(trainer: Any, *args: Any) -> Any:
        updates = trainer.get_num_updates()
        result = trainer_step(trainer, *args)
        if trainer.get_num_updates() > updates:
            losses.extend(batch_loss)
        return result

    setattr(FairseqTask, "train_step", recording_task_step)  # noqa: B010 (mypy: a method)
    setattr(Trainer, "train_step", recording_trainer_step)  # noqa: B010
    sys.argv[1:] = flags
    cli_main()
    out.write_text(json.dumps(losses), encoding="utf-8")


def main() -> None:
    """Entry point."""
    if sys.argv[1:2] == ["--child"]:
        train(Path(sys.argv[2]), sys.argv[3] == "reversed", sys.argv[4:])
        return
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="output of fairseq-preprocess")
    parser.add_argument("--updates", type=positive, metavar="N", help="default: 500")
    parser.add_argument("--size", choices=SIZES, help="size of the model; default: demo")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="default: 2048")
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="trainings at once, spread over the GPUs"
    )
    add_common_flags(parser, "curves", contenders=(), dtypes="fp32")
    args = parser.parse_args()
    normalise_common_flags(args, "curves")
    size = args.size or ("tiny" if args.quick else "demo")
    updates = args.updates or (6 if args.quick else 500)

    run = Run("curves", args.out, args.cpu)
    keys = list(product(("plain", "fast"), ("straight", "reversed")))
    with (
        data_folder(args.data, args.quick) as data,
        tempfile.TemporaryDirectory(prefix="bench-") as folder,
    ):

        def measure(key: tuple[str, str], device: int | None) -> list[float]:
            contender, order = key
            max_tokens = args.max_tokens or (800 if args.quick else 2048)
            shared: dict[str, Any] = {"size": size, "max_tokens": max_tokens, "dtype": "fp32", "workers": 0}
            flags = training_flags(contender, data, **shared, cpu=args.cpu)
            out = Path(folder, f"{contender}-{order}.json")
            command = [sys.executable, __file__, "--child", str(out), order, *flags, *FIXED]
            command += ["--max-update", str(updates), "--save-dir", folder]
            output_of(command, child_environment(device))
            losses: list[float] = json.loads(out.read_text(encoding="utf-8"))
            return losses

        curves = dict(zip(keys, on_gpus(measure, keys, at_once=args.jobs), strict=True))
    reference = curves["plain", "straight"]
    for (contender, order), curve in curves.items():
        differences = [abs(a - b) / abs(b) for a, b in zip(curve, reference, strict=True)]
        if (contender, order) != ("plain", "straight"):
            for end in sorted({min(end, updates) for end in CHECKPOINTS}):
                setting = {"size": size, "order": order, "updates": end}
                run.add("curves", contender, setting, max(differences[:end]), "relative")
    run.print_table()


if __name__ == "__main__":
    main()
