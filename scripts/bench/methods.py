"""Table ``methods``: BLEU, size and speed of every method of encoder layer fusion, from raw text.

    python scripts/bench/methods.py TEXT --work DIR --jobs 14 --speed
    python scripts/bench/methods.py TEXT --work DIR --reverse --method vanilla surface-hard surface-soft
    python scripts/bench/methods.py --quick            tiny, on the CPU if there is no GPU

TEXT contains core.{train,valid,test}.{en,ro} and newstest2016.{en,ro}.

1. The text is segmented into joint sentencepiece units and binarised in DIR.
2. Each method is trained with each seed and the same flags, ``--jobs`` trainings at once.
3. Both test sets are translated with beam 4 and scored as plain text. Each method is compared with the plain
   Transformer: mean and deviation over seeds, and a paired bootstrap over the sentences of all seeds.
4. With ``--speed``, target tokens per second of training are measured in the steady state, one method after
   the other (the median over passes), and those of fairseq's own Transformer with fairseq's trainer,
   optimizer and loss.

Results that DIR already contains for the same flags are reused; their rows name the machine that trained
them.

``--quick`` tests the script: every method with one seed, one layer and 3 updates on the 220 sentence pairs of
the tests. It takes 9 minutes on 2 cores of an Intel Xeon, less with ``--jobs 2``. Its BLEU is 0.

The recipe was tuned for the plain Transformer only (``tune.py``); all methods use it.
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from contenders import FAST, MODELS, OURS, SIZES, on_gpus
from experiment import Recipe, parse_flags, prepare, read_references, train_and_translate, work_folder
from results import Run, join_names, learning_rate, positive, probability
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest
from steady import build_trainer, free_memory, silence_logs, tokens_per_second, training_data

from surface_fusion.encoder_fusion import methods
from surface_fusion.scoring import score_text

METHODS: dict[str, tuple[str, ...]] = {
    "vanilla": (),
    "surface-hard": ("--surfacefusion", "att", "--sf-mode", "hard", "--sf-gate", "0.8"),
    "surface-soft": ("--surfacefusion", "att", "--sf-mode", "soft"),
    **{name: ("--encoder-fusion", name) for name in methods()},
}
"""Model flags. ``extra-layers`` has 7 encoder layers."""
for _name in ("transparent", "fine-grained"):  # with the embedding layer, as in the paper
    METHODS[_name] += ("--encoder-fusion-embedding",)

TEST_SETS = ("core", "newstest2016")


def bootstrap(baseline: Sequence[str], system: Sequence[str], references: Sequence[str]) -> float:
    """Return p of a paired bootstrap test (Koehn, 2004) of the BLEU of two systems, 1,000 samples."""
    systems = [("baseline", list(baseline)), ("system", list(system))]
    metrics = {"BLEU": BLEU(references=[list(references)])}
    test = PairedTest(systems, metrics, references=None, test_type="bs", n_samples=1000)
    value: float = test()[1]["BLEU"][1].p_value
    return value


def measure_speed(recipe: Recipe, data: Path, run: Run, args: argparse.Namespace) -> None:
    """Add rows of the training speed of each method and of fairseq's own Transformer."""
    silence_logs()
    flags = [*recipe.flags(data, cpu=args.cpu, workers=0), "--distributed-world-size", "1"]
    models = {"fairseq": MODELS["fairseq"]}
    models |= {method: (*OURS, *METHODS[method], *FAST) for method in args.method}
    for name, model in models.items():
        trainer, batches = build_trainer([*flags, *model], recipe.max_tokens, training_data)
        speeds = tokens_per_second(trainer, batches, *((1, 2) if args.quick else (3, 9)), args.cpu)
        run.add("methods", name, recipe.setting(), statistics.median(speeds), "tok/s", len(speeds))
        del trainer
        free_memory(args.cpu)


def parse() -> argparse.Namespace:
    """Parse the command line; vanilla comes first in ``method``, because the others are compared with it."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", type=positive, nargs="+", metavar="N", help="default: 1 2 3; --quick: 1")
    parser.add_argument("--reverse", action="store_true", help="Romanian to English")
    parser.add_argument("--size", choices=SIZES, help="default: base")
    parser.add_argument("--norm", choices=("pre", "post"), default="pre")
    parser.add_argument("--dropout", type=probability, default=0.3)
    parser.add_argument("--lr", type=learning_rate, default=1e-3)
    parser.add_argument("--speed", action="store_true", help="also measure the speed of training")
    args = parse_flags(parser, "methods")
    if args.speed and args.score_only:
        parser.error("--speed trains, and --score-only does not; leave one out")
    args.seeds = list(dict.fromkeys(args.seeds or ([1] if args.quick else [1, 2, 3])))
    args.method = sorted(dict.fromkeys(args.method), key=lambda method: method != "vanilla")
    args.size = args.size or ("tiny" if args.quick else "base")
    return args


def main() -> None:
    """Entry point."""
    args = parse()
    run = Run("methods", args.out, args.cpu)
    languages = ("ro", "en") if args.reverse else ("en", "ro")
    recipe = Recipe(
        *(*languages, args.size, args.norm, args.dropout, args.lr, args.updates, args.max_tokens),
        dtype=args.dtype[0],
        vocab=args.vocab,
    )
    names = {key: f"{key[0]}-{key[1]}" for key in product(args.method, args.seeds)}
    with work_folder(args.work, languages, names.values() if args.score_only else None) as folder:
        data = prepare(args.text, folder, languages, args.vocab, args.files)
        references = {name: read_references(name, languages[1], args) for name in TEST_SETS}
        errors = []

        def measure(key: tuple[str, int], device: int | None) -> dict[str, Any] | None:
            method, seed = key
            model = (*METHODS[method], *FAST)
            try:
                outcome = train_and_translate(
                    *(model, seed, recipe, TEST_SETS, data, folder / names[key]),
                    **args.train_options,
                    device=device,
                )
            except (SystemExit, OSError) as error:  # the other trainings continue
                errors.append(f"{method}, seed {seed}: {error}")
                return None
            add_rows(run, method, seed, outcome, references, recipe, first_seed=seed == args.seeds[0])
            return outcome

        outcomes: dict[str, list[dict[str, Any]]] = {method: [] for method in args.method}
        lines = []
        for (method, _), outcome in zip(names, on_gpus(measure, names, at_once=args.jobs), strict=True):
            outcomes[method] += [outcome] if outcome else []
            if len(outcomes[method]) == len(args.seeds):
                lines += summary(method, outcomes, references, recipe, run)
        print(*lines, sep="\n")
        if args.speed:
            measure_speed(recipe, data, run, args)
    if errors:
        raise SystemExit("\n".join(errors))


def add_rows(
    run: Run,
    method: str,
    seed: int,
    outcome: dict[str, Any],
    references: dict[str, list[str]],
    recipe: Recipe,
    first_seed: bool,
) -> None:
    """Add the scores of one training; for the first seed also the number of parameters."""
    machine = outcome["machine"]
    for name in TEST_SETS:
        for score in score_text(outcome["translations"][name], references[name]):
            setting = {**recipe.setting(), "test": name, "seed": seed}
            run.add("methods", method, setting, score.value, score.name.replace("sacre", ""), machine=machine)
    if first_seed:
        run.add("methods", method, recipe.setting(), outcome["parameters"], "parameters", machine=machine)


def summary(
    method: str,
    outcomes: dict[str, list[dict[str, Any]]],
    references: dict[str, list[str]],
    recipe: Recipe,
    run: Run,
) -> list[str]:
    """Return a line for each test set: mean and deviation over seeds, and p against vanilla; add p as a row.

    Args:
        method: the method.
        outcomes: of each method, one for each seed that did not fail.
        references: of each test set.
        recipe: the recipe of all trainings.
        run: the run to add rows to.
    """
    lines = []
    vanilla = outcomes.get("vanilla", [])
    compared = [*vanilla, *outcomes[method]]
    machine = {
        key: join_names(outcome["machine"][key] for outcome in compared) for key in compared[0]["machine"]
    }
    for name in TEST_SETS:
        texts = [outcome["translations"][name] for outcome in outcomes[method]]
        scores = [score_text(text, references[name])[0] for text in texts]
        values = [score.value for score in scores]
        line = f"{name:13s}{method:15s}{statistics.mean(values):6.2f}"
        line += f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        if method != "vanilla" and len(vanilla) == len(texts):
            baseline = chain(*(outcome["translations"][name] for outcome in vanilla))
            p = bootstrap([*baseline], [*chain(*texts)], references[name] * len(texts))
            setting = {**recipe.setting(), "test": name}
            run.add("methods", method, setting, p, "p", len(texts), machine=machine)
            line += f"  p = {p:.3f}"
        lines.append(f"{line}  {scores[0].signature}")
    return lines


if __name__ == "__main__":
    main()
