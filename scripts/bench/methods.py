"""Table ``methods``: BLEU, size and speed of every method of encoder layer fusion, from raw text.

    python scripts/bench/methods.py TEXT --work DIR [--jobs 12] [--seeds 1 2 3] [--updates 6000]
    python scripts/bench/methods.py TEXT --work DIR --reverse --method vanilla surface-hard surface-soft
    python scripts/bench/methods.py --quick            tiny, on the CPU if there is no GPU

TEXT holds core.{train,valid,test}.{en,ro} and newstest2016.{en,ro}. The text is cut into joint sentencepiece
units and binarised in DIR; each method is trained with each seed by the same command line, several at once;
both test sets are translated (beam 4) and scored as plain text. Then each method against the plain
Transformer: mean and deviation over seeds, and a paired bootstrap over the sentences of all seeds. What DIR
holds already is not done again. With ``--speed`` each is then trained alone for 300 updates: tokens a second
of the last 200.

The recipe was chosen for the plain Transformer alone; all methods share it. Nothing is left out of the table.
"""

import argparse
import json
import os
import statistics
import sys
import tempfile
from collections.abc import Sequence
from itertools import product
from pathlib import Path

from contenders import ONLY_LAST, OURS, PRECISION, SAMPLE, SIZES, child_environment, on_gpus, output_of
from results import Run, add_common_flags, settle_common_flags
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest
from train import timed_training

from surface_fusion.cli.info import checkpoint_facts
from surface_fusion.encoder_fusion.config import NAMES
from surface_fusion.scoring import parse_generate_output, score_text

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
import segment

METHODS: dict[str, tuple[str, ...]] = {
    "vanilla": (),
    "surface-hard": ("--surfacefusion", "att", "--sf-mode", "hard", "--sf-gate", "0.8"),
    "surface-soft": ("--surfacefusion", "att", "--sf-mode", "soft"),
    **{name: ("--encoder-fusion", name) for name in NAMES},
}
"""``extra-layers`` is the 7-layer encoder. Layer attention reads the embedding layer too, as in the paper."""
for _name in ("transparent", "fine-grained"):
    METHODS[_name] += ("--encoder-fusion-embedding",)

TRAINING = (
    *("--share-all-embeddings", "--label-smoothing", "0.1", "--attention-dropout", "0", "--clip-norm", "1"),
    *("--optimizer", "flat_adam", "--criterion", "fused_label_smoothed_cross_entropy"),
    *("--adam-betas", "(0.9, 0.98)", "--lr-scheduler", "inverse_sqrt", "--warmup-init-lr", "1e-7"),
    *("--no-progress-bar", "--log-format", "json", "--log-interval", "100", "--disable-validation"),
)
TEST_SETS = {"core": "test", "newstest2016": "test1"}
"""By the names that fairseq gives them."""


def prepare(text: Path, folder: Path, languages: tuple[str, str], vocab: int, quick: bool) -> Path:
    """Cut and binarise the text in *folder*, unless it is there: the data folder."""
    data = folder / "data-bin"
    if data.exists():
        return data
    pieces = folder / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    names = {split: split if quick else f"core.{split}" for split in ("train", "valid", "test")}
    names["test1"] = "test" if quick else "newstest2016"
    train = [text / f"{names['train']}.{language}" for language in languages]
    processor = segment.learn(train, folder / "spm.model", vocab)
    for (split, name), language in product(names.items(), languages):
        segment.encode(processor, text / f"{name}.{language}", pieces / f"{split}.{language}")
    command = [sys.executable, "-m", "surface_fusion", "preprocess", "--joined-dictionary"]
    command += ["-s", languages[0], "-t", languages[1], "--destdir", f"{data}.new"]
    command += ["--trainpref", str(pieces / "train"), "--validpref", str(pieces / "valid")]
    command += ["--testpref", f"{pieces / 'test'},{pieces / 'test1'}"]
    output_of(command, child_environment())
    os.replace(f"{data}.new", data)
    return data


def flags_of(method: str, data: Path, args: argparse.Namespace) -> list[str]:
    """The training of *method*, but for its seed, its length and its place."""
    return [
        *(str(data), *OURS, *METHODS[method], *TRAINING, *SIZES[args.size], *PRECISION[args.dtype[0]]),
        *("--encoder-normalize-before", "--decoder-normalize-before", "--dropout", str(args.dropout)),
        *("--lr", str(args.lr), "--warmup-updates", str(max(args.updates // 8, 1))),
        *("--max-tokens", str(args.max_tokens), "--num-workers", "0" if args.quick else "1"),
        *(("--cpu",) if args.cpu else ()),
    ]


def train_and_translate(
    method: str, seed: int, data: Path, folder: Path, device: int | None, args: argparse.Namespace
) -> dict[str, list[str]]:
    """The translations of each test set, from *folder* if they are there."""
    kept = folder / "translations.json"
    if not kept.exists():
        environment = child_environment(device)
        flags = [*flags_of(method, data, args), "--seed", str(seed), "--max-update", str(args.updates)]
        flags += [*ONLY_LAST, "--save-dir", str(folder)]
        output_of([sys.executable, "-m", "surface_fusion", "train", *flags], environment)
        found = {}
        for name, subset in TEST_SETS.items():
            flags = [str(data), "--path", str(folder / "checkpoint_last.pt"), "--gen-subset", subset]
            flags += ["--beam", "4", "--batch-size", "128", "--remove-bpe", "sentencepiece"]
            flags += ["--max-len-a", "1.2", "--max-len-b", "10", *(("--cpu",) if args.cpu else ())]
            flags += ["--fp16"] if args.dtype[0] == "fp16" else []
            printed = output_of([sys.executable, "-m", "surface_fusion", "generate", *flags], environment)
            found[name] = parse_generate_output(printed.splitlines()).text
        beside = kept.with_suffix(".new")
        beside.write_text(json.dumps(found, ensure_ascii=False), encoding="utf-8")
        os.replace(beside, kept)
    translations: dict[str, list[str]] = json.loads(kept.read_text(encoding="utf-8"))
    return translations


def bootstrap(base: Sequence[str], other: Sequence[str], references: Sequence[str]) -> float:
    """p of a paired bootstrap (Koehn, 2004) between two systems' BLEU, 1,000 samples."""
    systems = [("base", list(base)), ("other", list(other))]
    metrics = {"BLEU": BLEU(references=[list(references)])}
    test = PairedTest(systems, metrics, references=None, test_type="bs", n_samples=1000)
    value: float = test()[1]["BLEU"][1].p_value
    return value


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("text", type=Path, nargs="?", metavar="TEXT")
    parser.add_argument("--work", type=Path, metavar="DIR", help="data, checkpoints, translations")
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3], metavar="N")
    parser.add_argument("--reverse", action="store_true", help="Romanian to English")
    parser.add_argument("--updates", type=int, metavar="N", help="default: 6000")
    parser.add_argument("--max-tokens", type=int, metavar="N", help="default: 4096")
    parser.add_argument("--vocab", type=int, metavar="N", help="sentencepiece units; default: 8000")
    parser.add_argument("--size", choices=SIZES, help="default: base")
    parser.add_argument("--dropout", type=float, default=0.3)
    parser.add_argument("--lr", type=float, default=1e-3)
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="trainings at once, over all GPUs")
    parser.add_argument("--speed", action="store_true", help="measure tokens a second, one after another")
    add_common_flags(parser, "methods")
    args = parser.parse_args()
    settle_common_flags(args, "methods")
    if not args.quick and (args.text is None or args.work is None):
        parser.error("give TEXT and --work DIR, or --quick")
    args.updates = args.updates or (3 if args.quick else 6000)
    args.max_tokens = args.max_tokens or (800 if args.quick else 4096)
    args.size = args.size or ("tiny" if args.quick else "base")
    languages = ("ro", "en") if args.reverse else ("en", "ro")

    run = Run("methods", args.out, args.cpu)
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(args.work or temporary) / "-".join(languages)
        vocab = args.vocab or (300 if args.quick else 8000)
        text = SAMPLE if args.quick else args.text
        data = prepare(text, folder, languages, vocab, args.quick)
        files = {"core": "core.test", "newstest2016": "newstest2016"}
        references = {
            name: (text / f"{'test' if args.quick else file}.{languages[1]}").read_text("utf-8").splitlines()
            for name, file in files.items()
        }
        setting = {"direction": "-".join(languages), "size": args.size, "updates": args.updates}
        setting |= {"dropout": args.dropout, "dtype": args.dtype[0]}
        found: dict[tuple[str, int], dict[str, list[str]]] = {}

        def measure(key: tuple[str, int], device: int | None) -> None:
            method, seed = key
            place = folder / f"{method}-{seed}"
            found[key] = train_and_translate(method, seed, data, place, device, args)
            for name, lines in found[key].items():
                for score in score_text(lines, references[name]):
                    row = {**setting, "test": name, "seed": seed}
                    run.add("methods", method, row, score.value, score.name.replace("sacre", ""))
            if seed == args.seeds[0]:
                size = checkpoint_facts(str(place / "checkpoint_last.pt"), trust=False)["parameters"]
                run.add("methods", method, setting, size, "parameters")

        list(on_gpus(measure, [*product(args.method, args.seeds)], at_once=args.jobs))
        if args.speed:
            for method in args.method:
                most = 3 if args.quick else 300
                flags = [*flags_of(method, data, args), "--no-save"]
                (record,) = timed_training(flags, cold=most // 3, steady=most, most=most)
                seconds, tokens, start = record["seconds"], record["tokens"], most // 3
                rate = sum(tokens[start:]) / (seconds[-1] - seconds[start - 1])
                run.add("methods", method, setting, rate, "tok/s")
        for method, name in product(args.method, TEST_SETS):
            scores = [score_text(found[method, seed][name], references[name])[0] for seed in args.seeds]
            values = [score.value for score in scores]
            line = f"{name:13s}{method:15s}{statistics.mean(values):6.2f}"
            line += f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
            if method != "vanilla" and "vanilla" in args.method:
                pairs = [
                    [line for seed in args.seeds for line in found[system, seed][name]]
                    for system in ("vanilla", method)
                ]
                p = bootstrap(*pairs, references[name] * len(args.seeds))
                run.add("methods", method, {**setting, "test": name}, p, "p", len(args.seeds))
                line += f"  p = {p:.3f}"
            print(f"{line}  {scores[0].signature}")


if __name__ == "__main__":
    main()
