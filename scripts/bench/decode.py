"""Table ``decode``: translating the test set with beam 4, one sentence at a time and in batches of 128.

    python scripts/bench/decode.py DATA-BIN                     trains two models for 600 updates first, fast
    python scripts/bench/decode.py DATA-BIN --path OURS.pt --fairseq-path THEIRS.pt
    python scripts/bench/decode.py --quick                      tiny, on the CPU if there is no GPU

Contenders, each in a process of its own (with ``--quick`` in one): fairseq's plain Transformer; our model
decoded by the modules (``sf_plain``); the same checkpoint decoded fast. The clock runs over fairseq's own
loop, the search included.

* ``batch=1``: the first 30 sentences; ``batch=128``: all of them, sorted by length as fairseq does;
* ``phase=cold``: the first pass, ``phase=steady``: median of 3 further ones.

Models differ in the length of their translations: with ``tok/s`` (of the best hypotheses) the longer ones
look quicker, with ``sent/s`` the shorter ones; with ``--length`` all have one length. In
fp32 the script ends with status 1 if plain and fast differ in a token; it says how far apart the scores are.
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
    ONLY_LAST,
    SIZES,
    child_environment,
    data_folder,
    on_gpus,
    output_of,
    training_flags,
)
from fairseq.checkpoint_utils import load_checkpoint_to_cpu
from results import Run, add_common_flags, positive, settle_common_flags
from timed_generation import Decoded, Spec
from train import timed_training


def train_model(
    contender: str, data: Path, folder: Path, args: argparse.Namespace, device: int | None
) -> Path:
    """A checkpoint of a short training in *folder*; the learning rate rises faster than in a long one."""
    flags = training_flags(
        *(contender, data),
        size=args.size,
        max_tokens=800 if args.quick else 16384,
        dtype="fp32" if args.cpu else "fp16",
        workers=0 if args.quick else 8,
        cpu=args.cpu,
    )
    flags += ["--warmup-updates", str(args.train_updates // 2), "--dropout", "0.1"]
    flags += [*ONLY_LAST, "--save-dir", str(folder / contender)]
    timed_training(flags, cold=args.train_updates, steady=0, most=args.train_updates, device=device)
    path = folder / contender / "checkpoint_last.pt"
    if contender == "vanilla":
        state = torch.load(path, weights_only=False)
        state["cfg"]["model"].arch = state["cfg"]["model"]._name = "transformer"
        torch.save({**state, "last_optimizer_state": None}, path)
    print(f"{contender}: trained", flush=True)
    return path


def timed_generation(specs: list[Spec], folder: Path, device: int | None = None) -> list[list[Decoded]]:
    """Run ``timed_generation.py``: *specs* in turn, in one process; on GPU number *device*, if given.

    Raises:
        SystemExit: it failed; with the end of its output.
    """
    folder = Path(tempfile.mkdtemp(dir=folder))
    spec_file, out = folder / "specs.json", folder / "decoded.json"
    spec_file.write_text(json.dumps([asdict(spec) for spec in specs]), encoding="utf-8")
    script = str(Path(__file__).with_name("timed_generation.py"))
    command = [sys.executable, script, str(spec_file), str(out)]
    output_of(command, child_environment(device, triton_cache=folder / "triton"))
    results = json.loads(out.read_text(encoding="utf-8"))
    return [[Decoded(**fields) for fields in several] for several in results]


def mode_of(checkpoint: str) -> str:
    """``hard`` or ``renormalised``, as the checkpoint's model fuses."""
    model = load_checkpoint_to_cpu(checkpoint)["cfg"].model
    return "renormalised" if getattr(model, "sf_renormalize", False) else "hard"


def differing(one: Decoded, other: Decoded) -> list[float]:
    """How far apart the scores are of each sentence whose translations are not the same."""
    pairs = zip(one.best, other.best, one.scores, other.scores, strict=True)
    return [abs(a - b) for mine, theirs, a, b in pairs if mine != theirs]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="of fairseq-preprocess")
    parser.add_argument("--path", type=Path, metavar="CHECKPOINT", help="of ours, instead of a training")
    parser.add_argument("--fairseq-path", type=Path, metavar="CHECKPOINT", help="of the plain Transformer")
    parser.add_argument("--train-updates", type=positive, metavar="N", help="default: 600")
    parser.add_argument("--size", choices=SIZES, help="of the models trained; default: base, the README's")
    parser.add_argument("--batch", type=positive, nargs="+", metavar="N", help="sentences; default: 1 128")
    parser.add_argument("--first", type=positive, metavar="N", help="sentences decoded in batches of 1")
    parser.add_argument(
        "--length", type=positive, metavar="N", help="tokens of each translation; default: as the model likes"
    )
    parser.add_argument(
        "--side-by-side", action="store_true", help="several processes at once, each on a GPU of its own"
    )
    parser.add_argument(
        "--repeat", type=positive, metavar="N", help="timed passes after the first; default: 3"
    )
    add_common_flags(parser, "decode")
    args = parser.parse_args()
    both_precisions = args.dtype is None
    settle_common_flags(args, "decode")
    if both_precisions and not args.cpu:
        args.dtype = ["fp16", "fp32"]
    if "bf16" in args.dtype:
        parser.error("fairseq-generate knows fp16 and fp32 only")
    args.size = args.size or ("tiny" if args.quick else "base")
    if args.side_by_side and args.cpu:
        parser.error("--side-by-side is for a machine with several GPUs")
    args.train_updates = args.train_updates or (8 if args.quick else 600)

    run = Run("decode", args.out, args.cpu)
    with (
        data_folder(args.data, args.quick) as data,
        tempfile.TemporaryDirectory(prefix="bench-") as temporary,
    ):
        folder = Path(temporary)
        paths = {"fast": args.path, "vanilla": args.fairseq_path}
        model_of = {"fairseq": "vanilla", "plain": "fast", "fast": "fast"}
        at_once = torch.cuda.device_count() if args.side_by_side else 1
        names = {model_of[contender] for contender in args.contender}
        missing = sorted(name for name in names if paths[name] is None)
        trained = on_gpus(
            lambda name, device: train_model(name, data, folder, args, device), missing, at_once=at_once
        )
        paths |= dict(zip(missing, trained, strict=True))
        specs = {
            (contender, dtype): Spec(
                data=str(data),
                checkpoint=str(paths[model_of[contender]]),
                overrides={"sf_plain": True} if contender == "plain" else {},
                dtype=dtype,
                batch_sizes=args.batch or [1, 128],
                max_len=8 if args.quick else 10,
                length=args.length,
                first=args.first or (5 if args.quick else 30),
                passes=1 + (args.repeat or (1 if args.quick else 3)),
                cpu=args.cpu,
            )
            for dtype in args.dtype
            for contender in args.contender
        }
        mode = mode_of(str(paths["fast"])) if "fast" in names else "none"
        best: dict[tuple[str, int], dict[str, Decoded]] = {}

        def keep(contender: str, dtype: str, several: list[Decoded]) -> None:
            for done in several:
                best.setdefault((dtype, done.batch_size), {})[contender] = done
                setting = {"batch": done.batch_size, "beam": 4, "dtype": dtype, "mode": mode}
                setting |= {"length": args.length} if args.length else {}
                print(f"{contender}: {done.tokens / done.sentences:.1f} tokens a translation")
                for phase, seconds in (("cold", done.seconds[:1]), ("steady", done.seconds[1:])):
                    median, n = statistics.median(seconds), len(seconds)
                    for amount, unit in ((done.sentences, "sent/s"), (done.tokens, "tok/s")):
                        run.add("decode", contender, {**setting, "phase": phase}, amount / median, unit, n)

        def measure(key: tuple[str, str], device: int | None) -> None:
            keep(*key, timed_generation([specs[key]], folder, device)[0])

        if args.quick:  # in one process it is quicker; otherwise none is to be warmed up by another
            for key, several in zip(specs, timed_generation([*specs.values()], folder), strict=True):
                keep(*key, several)
        else:
            list(on_gpus(measure, specs, at_once=at_once))
    run.print_table()
    failed = False
    for (dtype, batch_size), found in best.items():
        if "plain" in found and "fast" in found:
            apart = differing(found["plain"], found["fast"])
            said = f", their scores by up to {max(apart):.1e}" if apart else ""
            different = f"{len(apart)} of {found['fast'].sentences} translations differ{said}"
            print(f"{dtype}, batch {batch_size}: {different}")
            failed = failed or (dtype == "fp32" and len(apart) > 0)
    if failed:
        raise SystemExit("plain and fast decoding must not differ in fp32")


if __name__ == "__main__":
    main()
