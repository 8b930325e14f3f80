"""Table ``decode``: speed of translating the test set with beam 4, in batches of 1 and 128 sentences.

    python scripts/bench/decode.py DATA-BIN                     first trains two models for 600 updates
    python scripts/bench/decode.py DATA-BIN --path OURS.pt --fairseq-path THEIRS.pt
    python scripts/bench/decode.py --quick                      tiny, on the CPU if there is no GPU

Contenders, each in a process of its own (with ``--quick`` in one): fairseq's plain Transformer (``fairseq``),
our model decoded by fairseq's search and modules (``plain``, by ``sf_plain``), and the same checkpoint on the
fast path (``fast``). The time includes the search.

* ``batch=1``: the first 30 sentences; ``batch=128``: all sentences, sorted by length as fairseq does;
* ``phase=cold``: the first pass; ``phase=steady``: the median of 3 further passes.

Translations of different models differ in length: ``tok/s`` (tokens of the best hypotheses) favours models
with long translations, ``sent/s`` those with short ones; ``--length`` gives all translations one length. In
fp32 the script exits with status 1 if the tokens of plain and fast differ, and prints the difference of the
scores.
"""

import argparse
import json
import statistics
import sys
import tempfile
from dataclasses import asdict
from pathlib import Path

import torch
from contenders import (
    LAST_CHECKPOINT_ONLY,
    SIZES,
    child_environment,
    data_folder,
    on_gpus,
    output_of,
    training_flags,
)
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from results import Run, add_common_flags, normalise_common_flags, positive
from timed_generation import Decoded, Spec
from train import timed_training

MODEL_OF = {"fairseq": "vanilla", "plain": "fast", "fast": "fast"}
"""The key in :data:`contenders.MODELS` of the model that each contender decodes with."""


def train_model(
    contender: str, data: Path, folder: Path, args: argparse.Namespace, device: int | None
) -> Path:
    """Train for a few updates with a short warm-up in *folder* and return the checkpoint."""
    flags = training_flags(
        *(contender, data),
        size=args.size,
        max_tokens=800 if args.quick else 16384,
        dtype="fp32" if args.cpu else "fp16",
        workers=0 if args.quick else 8,
        cpu=args.cpu,
    )
    flags += ["--warmup-updates", str(args.train_updates // 2), "--dropout", "0.1"]
    flags += [*LAST_CHECKPOINT_ONLY, "--save-dir", str(folder / contender)]
    timed_training(flags, cold=args.train_updates, steady=0, max_updates=args.train_updates, device=device)
    path = folder / contender / "checkpoint_last.pt"
    if contender == "vanilla":
        state = torch.load(path, weights_only=False)
        state["cfg"]["model"].arch = state["cfg"]["model"]._name = "transformer"
        torch.save({**state, "last_optimizer_state": None}, path)
    print(f"{contender}: trained", flush=True)
    return path


def timed_generation(specs: list[Spec], folder: Path, device: int | None = None) -> list[list[Decoded]]:
    """Run ``timed_generation.py``: decode *specs* one after another in one process.

    Args:
        specs: what to decode.
        folder: folder for temporary files.
        device: index of the GPU; None for all.

    Raises:
        SystemExit: the process failed; the message has the end of its output.
    """
    folder = Path(tempfile.mkdtemp(dir=folder))
    spec_file, out = folder / "specs.json", folder / "decoded.json"
    spec_file.write_text(json.dumps([asdict(spec) for spec in specs]), encoding="utf-8")
    script = str(Path(__file__).with_name("timed_generation.py"))
    command = [sys.executable, script, str(spec_file), str(out)]
    output_of(command, child_environment(device, triton_cache=folder / "triton"))
    results = json.loads(out.read_text(encoding="utf-8"))
    return [[Decoded(**fields) for fields in of_spec] for of_spec in results]


def mode_of(checkpoint: str) -> str:
    """Return the fusion mode of the checkpoint's model: ``hard`` or ``renormalised``."""
    model = load_checkpoint_to_cpu(checkpoint)["cfg"].model
    return "renormalised" if getattr(model, "sf_renormalize", False) else "hard"


def score_differences(first: Decoded, second: Decoded) -> list[float]:
    """Return the difference of the scores for each sentence whose translations differ."""
    pairs = zip(first.best, second.best, first.scores, second.scores, strict=True)
    return [abs(a - b) for tokens, other_tokens, a, b in pairs if tokens != other_tokens]


def parse() -> argparse.Namespace:
    """Parse the command line and set the defaults that depend on it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="output of fairseq-preprocess")
    parser.add_argument("--path", type=Path, metavar="CHECKPOINT", help="our model, instead of training one")
    parser.add_argument(
        "--fairseq-path", type=Path, metavar="CHECKPOINT", help="plain Transformer, instead of training one"
    )
    parser.add_argument("--train-updates", type=positive, metavar="N", help="default: 600")
    parser.add_argument("--size", choices=SIZES, help="size of trained models; default: base, the README's")
    parser.add_argument(
        "--batch", type=positive, nargs="+", metavar="N", help="sentences per batch; default: 1 128"
    )
    parser.add_argument("--first", type=positive, metavar="N", help="sentences decoded in batches of 1")
    parser.add_argument(
        "--length", type=positive, metavar="N", help="tokens per translation; default: the model decides"
    )
    parser.add_argument(
        "--side-by-side", action="store_true", help="run several processes at once, each on its own GPU"
    )
    parser.add_argument(
        "--repeat", type=positive, metavar="N", help="timed passes after the first; default: 3"
    )
    add_common_flags(parser, "decode")
    args = parser.parse_args()
    both_precisions = args.dtype is None
    normalise_common_flags(args, "decode")
    if both_precisions and not args.cpu:
        args.dtype = ["fp16", "fp32"]
    if "bf16" in args.dtype:
        parser.error("--dtype bf16: fairseq-generate supports fp16 and fp32 only")
    if args.side_by_side and args.cpu:
        parser.error("--side-by-side needs a machine with several GPUs")
    args.size = args.size or ("tiny" if args.quick else "base")
    args.train_updates = args.train_updates or (8 if args.quick else 600)
    args.batch = args.batch or [1, 128]
    args.first = args.first or (5 if args.quick else 30)
    args.repeat = args.repeat or (1 if args.quick else 3)
    args.at_once = torch.cuda.device_count() if args.side_by_side else 1
    return args


def checkpoints(data: Path, folder: Path, args: argparse.Namespace) -> dict[str, Path]:
    """Return the checkpoint of each contender; train in *folder* those that the user does not give."""
    existing = {"fast": args.path, "vanilla": args.fairseq_path}
    models = {name: MODEL_OF[name] for name in args.contender}
    missing = sorted(name for name in set(models.values()) if existing[name] is None)
    trained = on_gpus(
        lambda name, device: train_model(name, data, folder, args, device), missing, at_once=args.at_once
    )
    paths = {**existing, **dict(zip(missing, trained, strict=True))}
    return {name: paths[model] for name, model in models.items()}


def spec_of(contender: str, dtype: str, data: Path, checkpoint: Path, args: argparse.Namespace) -> Spec:
    """Return what ``timed_generation.py`` decodes for *contender*."""
    return Spec(
        data=str(data),
        checkpoint=str(checkpoint),
        overrides={"sf_plain": True} if contender == "plain" else {},
        dtype=dtype,
        batch_sizes=args.batch,
        max_len=8 if args.quick else 10,
        length=args.length,
        first=args.first,
        passes=1 + args.repeat,
        cpu=args.cpu,
    )


def add_rows(run: Run, contender: str, setting: dict[str, object], decoded: Decoded) -> None:
    """Add the speeds of one contender with one batch size."""
    print(f"{contender}: {decoded.tokens / decoded.sentences:.1f} tokens per translation")
    for phase, seconds in (("cold", decoded.seconds[:1]), ("steady", decoded.seconds[1:])):
        median, n = statistics.median(seconds), len(seconds)
        for count, unit in ((decoded.sentences, "sent/s"), (decoded.tokens, "tok/s")):
            run.add("decode", contender, {**setting, "phase": phase}, count / median, unit, n)


def compare_paths(results: dict[tuple[str, str, int], Decoded]) -> None:
    """Print how many translations of plain and fast differ.

    Raises:
        SystemExit: some differ in fp32.
    """
    failed = False
    for (contender, dtype, batch_size), fast in results.items():
        plain = results.get(("plain", dtype, batch_size))
        if contender != "fast" or plain is None:
            continue
        differences = score_differences(plain, fast)
        scores = f", their scores by up to {max(differences):.1e}" if differences else ""
        print(
            f"{dtype}, batch {batch_size}: {len(differences)} of {fast.sentences} translations differ{scores}"
        )
        failed = failed or (dtype == "fp32" and len(differences) > 0)
    if failed:
        raise SystemExit("plain and fast decoding must not differ in fp32")


def main() -> None:
    """Entry point."""
    args = parse()
    run = Run("decode", args.out, args.cpu)
    results: dict[tuple[str, str, int], Decoded] = {}
    with (
        data_folder(args.data, args.quick) as data,
        tempfile.TemporaryDirectory(prefix="bench-") as temporary,
    ):
        folder = Path(temporary)
        paths = checkpoints(data, folder, args)
        keys = [(contender, dtype) for dtype in args.dtype for contender in args.contender]
        specs = {key: spec_of(*key, data, paths[key[0]], args) for key in keys}
        ours = next((path for name, path in paths.items() if MODEL_OF[name] == "fast"), None)
        mode = "none" if ours is None else mode_of(str(ours))

        def add(contender: str, dtype: str, of_sizes: list[Decoded]) -> None:
            for decoded in of_sizes:
                results[contender, dtype, decoded.batch_size] = decoded
                setting = {"batch": decoded.batch_size, "beam": 4, "dtype": dtype, "mode": mode}
                setting |= {"length": args.length} if args.length else {}
                add_rows(run, contender, setting, decoded)

        def measure(key: tuple[str, str], device: int | None) -> None:
            add(*key, timed_generation([specs[key]], folder, device)[0])

        if args.quick:  # one process saves time; otherwise no contender may warm up the next one
            for key, of_sizes in zip(specs, timed_generation([*specs.values()], folder), strict=True):
                add(*key, of_sizes)
        else:
            list(on_gpus(measure, specs, at_once=args.at_once))
    run.print_table()
    compare_paths(results)


if __name__ == "__main__":
    main()
