"""Table ``quality``: BLEU of the plain and of the fast path after the same number of updates.

    python scripts/bench/quality.py DATA-BIN --updates 1500 [--seeds 1 2 3] [--jobs 6]
    python scripts/bench/quality.py --quick            tiny, on the CPU if there is no GPU

The model is trained with each seed on the plain path (fairseq's Adam and loss) and on the fast path. The test
set is translated with beam 4, on the fast path for both: it gives the same tokens as the plain path
(``decode.py``). sacreBLEU scores the detokenised text. The two paths draw different random numbers for
dropout, so compare the difference of the means with the deviation over seeds.
"""

import argparse
import statistics
import sys
import tempfile
from itertools import product
from pathlib import Path

from contenders import (
    LAST_CHECKPOINT_ONLY,
    SIZES,
    USER_DIR,
    child_environment,
    data_folder,
    on_gpus,
    output_of,
    training_flags,
)
from results import Run, add_common_flags, normalise_common_flags, positive

from surface_fusion.io.lines import split_lines
from surface_fusion.scoring import Score, parse_generate_output, score_text


def bleu(
    contender: str, seed: int, data: Path, folder: Path, device: int | None, args: argparse.Namespace
) -> Score:
    """Train in *folder*, translate the test set and return its BLEU."""
    flags = training_flags(
        *(contender, data),
        size=args.size,
        max_tokens=args.max_tokens,
        dtype=args.dtype[0],
        workers=0 if args.quick else 2,
        cpu=args.cpu,
    )
    flags += ["--seed", str(seed), "--warmup-updates", str(args.updates // 4), "--dropout", "0.1"]
    flags += ["--max-update", str(args.updates), *LAST_CHECKPOINT_ONLY, "--save-dir", str(folder)]
    environment = child_environment(device)
    output_of([sys.executable, "-m", "fairseq_cli.train", *flags], environment)
    flags = [str(data), "--path", str(folder / "checkpoint_last.pt"), "--beam", "4", "--batch-size", "64"]
    flags += ["--remove-bpe", "sentencepiece", "--max-len-a", "1.2", "--max-len-b", "10", *USER_DIR]
    flags += ["--model-overrides", repr({"sf_plain": False})]
    flags += ["--cpu"] if args.cpu else []
    flags += ["--fp16"] if args.dtype == ["fp16"] else []
    output = output_of([sys.executable, "-m", "fairseq_cli.generate", *flags], environment)
    generated = parse_generate_output(split_lines(output))
    return score_text(generated.text, generated.tokenised_references)[0]


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path, nargs="?", metavar="DATA-BIN", help="output of fairseq-preprocess")
    parser.add_argument("--updates", type=positive, metavar="N", help="updates per training; default: 1500")
    parser.add_argument("--seeds", type=positive, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="default: 4096")
    parser.add_argument("--size", choices=SIZES, help="size of the model; default: demo, the demo's")
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="trainings at once, spread over the GPUs"
    )
    add_common_flags(parser, "quality", contenders=("plain", "fast"), dtypes="one")
    args = parser.parse_args()
    normalise_common_flags(args, "quality")
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

        scores = on_gpus(measure, keys, at_once=args.jobs)
        for (contender, _), score in zip(keys, scores, strict=True):
            values[contender].append(score.value)
    for contender, bleus in values.items():
        deviation = f" ± {statistics.stdev(bleus):.2f}" if len(bleus) > 1 else ""
        print(f"{contender}: {statistics.mean(bleus):.2f}{deviation} (n={len(bleus)}, {score.signature})")


if __name__ == "__main__":
    main()
