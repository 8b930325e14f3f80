"""Table ``quality``: BLEU of the plain and of the fast path after the same number of updates.

    python scripts/bench/quality.py DATA-BIN --updates 1500 [--seeds 1 2 3] [--jobs 6]
    python scripts/bench/quality.py --quick            tiny, on the CPU if there is no GPU

The same trainings by the modules with fairseq's own Adam and loss (``plain``), and fast; then the test set is
translated (beam 4; both by the fast way, which gives the same tokens: ``decode.py``) and scored by sacreBLEU,
on what SentencePiece makes plain text again. They differ in their random numbers of dropout, too: what counts
is whether the means are further apart than seeds are.
"""

import argparse
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path

from contenders import (
    ONLY_LAST,
    SIZES,
    USER_DIR,
    child_environment,
    data_folder,
    on_gpus,
    output_of,
    training_flags,
)
from results import Run, add_common_flags, positive, settle_common_flags

from surface_fusion.io.lines import split_lines
from surface_fusion.scoring import Score, parse_generate_output, score_text


def bleu(
    contender: str, seed: int, data: Path, folder: Path, device: int | None, args: argparse.Namespace
) -> Score:
    """Train in *folder*, translate and score."""
    flags = training_flags(
        *(contender, data),
        size=args.size,
        max_tokens=args.max_tokens,
        dtype=args.dtype[0],
        workers=0 if args.quick else 2,
        cpu=args.cpu,
    )
    flags += ["--seed", str(seed), "--warmup-updates", str(args.updates // 4), "--dropout", "0.1"]
    flags += ["--max-update", str(args.updates), *ONLY_LAST, "--save-dir", str(folder)]
    environment = child_environment(device)
    output_of([sys.executable, "-m", "fairseq_cli.train", *flags], environment)
    flags = [str(data), "--path", str(folder / "checkpoint_last.pt"), "--beam", "4", "--batch-size", "64"]
    flags += ["--remove-bpe", "sentencepiece", "--max-len-a", "1.2", "--max-len-b", "10", *USER_DIR]
    flags += ["--model-overrides", repr({"sf_plain": False})]
    flags += ["--cpu"] if args.cpu else []
    flags += ["--fp16"] if args.dtype == ["fp16"] else []
    printed = output_of([sys.executable, "-m", "fairseq_cli.generate", *flags], environment)
    found = parse_generate_output(split_lines(printed))
    return score_text(found.text, found.tokenised_references)[0]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="of fairseq-preprocess")
    parser.add_argument("--updates", type=positive, metavar="N", help="of each training; default: 1500")
    parser.add_argument("--seeds", type=positive, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="default: 4096")
    parser.add_argument("--size", choices=SIZES, help="of the model; default: demo, that of the quick start")
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="trainings at once, over all GPUs"
    )
    add_common_flags(parser, "quality", contenders=("plain", "fast"), dtypes="one")
    args = parser.parse_args()
    settle_common_flags(args, "quality")
    args.updates = args.updates or (4 if args.quick else 1500)
    args.max_tokens = args.max_tokens or (800 if args.quick else 4096)
    args.size = args.size or ("tiny" if args.quick else "demo")

    run = Run("quality", args.out, args.cpu)
    keys = list(dict.fromkeys(product(args.contender, args.seeds)))
    values: dict[str, list[float]] = {contender: [] for contender in args.contender}
    setting = {"size": args.size, "updates": args.updates, "max_tokens": args.max_tokens}
    setting |= {"dtype": args.dtype[0], "mode": "hard"}
    with (
        data_folder(args.data, args.quick) as data,
        tempfile.TemporaryDirectory(prefix="bench-") as temporary,
    ):

        def measure(key: tuple[str, int], device: int | None) -> Score:
            contender, seed = key
            score = bleu(contender, seed, data, Path(temporary, f"{contender}-{seed}"), device, args)
            run.add("quality", contender, {**setting, "seed": seed}, score.value, "BLEU")
            return score

        found = on_gpus(measure, keys, at_once=args.jobs)
        for (contender, _), score in zip(keys, found, strict=True):
            values[contender].append(score.value)
    for contender, several in values.items():
        spread = f" ± {statistics.stdev(several):.2f}" if len(several) > 1 else ""
        print(f"{contender}: {statistics.mean(several):.2f}{spread} (n={len(several)}, {score.signature})")


if __name__ == "__main__":
    main()
