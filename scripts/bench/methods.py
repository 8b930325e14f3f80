"""Table ``methods``: BLEU, size and speed of every method of encoder layer fusion, from raw text.

    python scripts/bench/methods.py TEXT --work DIR --jobs 14 --speed
    python scripts/bench/methods.py TEXT --work DIR --reverse --method vanilla surface-hard surface-soft
    python scripts/bench/methods.py --quick            tiny, on the CPU if there is no GPU

TEXT holds core.{train,valid,test}.{en,ro} and newstest2016.{en,ro}. The text is cut into joint sentencepiece
units and binarised in DIR; each method is trained with each seed by the same command line, several at once;
both test sets are translated (beam 4) and scored as plain text. Then each method against the plain
Transformer: mean and deviation over seeds, and a paired bootstrap over the sentences of all seeds. What DIR
holds already, by the same flags, is not done again, and its rows name the machine that did it. ``--speed``:
after that, target tokens a second of training, each alone, fairseq's own Transformer with its own optimizer
and loss too; steady state, the median over passes. The plugin is loaded there, so it has what the plugin
changes in fairseq's trainer (``surface_fusion/training/trainer.py``), too; ``train.py`` measures it without.

``--quick`` shows that the script works: every method, but one seed, a model of one layer and 3 updates on the
220 sentence pairs of the tests; 9 minutes on 2 cores of an Intel Xeon (less by ``--jobs 2``). Its BLEU is 0.

The recipe was chosen for the plain Transformer alone (``tune.py``); all methods share it. No method
is left out.
"""

import argparse
import statistics
from collections.abc import Sequence
from itertools import chain, product
from pathlib import Path
from typing import Any

from contenders import FAST, MODELS, OURS, SIZES, on_gpus
from experiment import Recipe, parse, prepare, references_of, train_and_translate, work_folder
from results import Run, positive, probability, rate, together
from sacrebleu.metrics.bleu import BLEU
from sacrebleu.significance import PairedTest
from steady import be_quiet, build, forget, rates, training_data

from surface_fusion.encoder_fusion import methods
from surface_fusion.scoring import score_text

METHODS: dict[str, tuple[str, ...]] = {
    "vanilla": (),
    "surface-hard": ("--surfacefusion", "att", "--sf-mode", "hard", "--sf-gate", "0.8"),
    "surface-soft": ("--surfacefusion", "att", "--sf-mode", "soft"),
    **{name: ("--encoder-fusion", name) for name in methods()},
}
"""``extra-layers`` is the 7-layer encoder. Layer attention reads the embedding layer too, as in the paper."""
for _name in ("transparent", "fine-grained"):
    METHODS[_name] += ("--encoder-fusion-embedding",)

TEST_SETS = ("core", "newstest2016")


def bootstrap(base: Sequence[str], other: Sequence[str], references: Sequence[str]) -> float:
    """p of a paired bootstrap (Koehn, 2004) between two systems' BLEU, 1,000 samples."""
    systems = [("base", list(base)), ("other", list(other))]
    metrics = {"BLEU": BLEU(references=[list(references)])}
    test = PairedTest(systems, metrics, references=None, test_type="bs", n_samples=1000)
    value: float = test()[1]["BLEU"][1].p_value
    return value


def speeds(methods: Sequence[str], recipe: Recipe, data: Path, run: Run, args: argparse.Namespace) -> None:
    """Rows of target tokens a second in training, each method alone; and of fairseq's own Transformer."""
    be_quiet()
    flags = [*recipe.flags(data, cpu=args.cpu, workers=0), "--distributed-world-size", "1"]
    models = {"fairseq": MODELS["fairseq"]}
    models |= {method: (*OURS, *METHODS[method], *FAST) for method in methods}
    for name, model in models.items():
        trainer, batches = build([*flags, *model], recipe.max_tokens, training_data)
        found = rates(trainer, batches, *((1, 2) if args.quick else (3, 9)), args.cpu)
        run.add("methods", name, recipe.setting(), statistics.median(found), "tok/s", len(found))
        del trainer
        forget(args.cpu)


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--method", nargs="+", choices=METHODS, default=list(METHODS), metavar="NAME")
    parser.add_argument("--seeds", type=positive, nargs="+", metavar="N", help="default: 1 2 3; --quick: 1")
    parser.add_argument("--reverse", action="store_true", help="Romanian to English")
    parser.add_argument("--size", choices=SIZES, help="default: base")
    parser.add_argument("--norm", choices=("pre", "post"), default="pre")
    parser.add_argument("--dropout", type=probability, default=0.3)
    parser.add_argument("--lr", type=rate, default=1e-3)
    parser.add_argument("--speed", action="store_true", help="measure the speed of training, too")
    args = parse(parser, "methods")
    if args.speed and args.score_only:
        parser.error("--speed trains, and --score-only does not; leave one out")
    args.seeds = list(dict.fromkeys(args.seeds or ([1] if args.quick else [1, 2, 3])))
    args.method = sorted(dict.fromkeys(args.method), key=lambda method: method != "vanilla")  # others need it

    run = Run("methods", args.out, args.cpu)
    languages = ("ro", "en") if args.reverse else ("en", "ro")
    size = args.size or ("tiny" if args.quick else "base")
    recipe = Recipe(
        *(*languages, size, args.norm, args.dropout, args.lr, args.updates, args.max_tokens, args.dtype[0]),
        vocab=args.vocab,
    )
    places = {key: f"{key[0]}-{key[1]}" for key in product(args.method, args.seeds)}
    with work_folder(args.work, languages, places.values() if args.score_only else None) as folder:
        data = prepare(args.text, folder, languages, args.vocab, args.files)
        references = {name: references_of(name, languages[1], args) for name in TEST_SETS}
        failed = []

        def measure(key: tuple[str, int], device: int | None) -> dict[str, Any] | None:
            method, seed = key
            model = (*METHODS[method], *FAST)
            place = folder / places[key]
            try:
                outcome = train_and_translate(
                    *(model, seed, recipe, TEST_SETS, data, place), **args.place, device=device
                )
            except (SystemExit, OSError) as error:  # the others go on
                failed.append(f"{method}, seed {seed}: {error}")
                return None
            machine = outcome["machine"]
            for name in TEST_SETS:
                for score in score_text(outcome["translations"][name], references[name]):
                    row = {**recipe.setting(), "test": name, "seed": seed}
                    unit = score.name.replace("sacre", "")
                    run.add("methods", method, row, score.value, unit, machine=machine)
            if seed == args.seeds[0]:
                size = outcome["parameters"]
                run.add("methods", method, recipe.setting(), size, "parameters", machine=machine)
            return outcome

        found: dict[str, list[dict[str, Any]]] = {method: [] for method in args.method}
        lines = []
        for (method, _), outcome in zip(places, on_gpus(measure, places, at_once=args.jobs), strict=True):
            found[method] += [outcome] if outcome else []
            if len(found[method]) == len(args.seeds):
                lines += summary(method, found, references, recipe, run)
        print(*lines, sep="\n")
        if args.speed:
            speeds(args.method, recipe, data, run, args)
    if failed:
        raise SystemExit("\n".join(failed))


def summary(
    method: str,
    found: dict[str, list[dict[str, Any]]],
    references: dict[str, list[str]],
    recipe: Recipe,
    run: Run,
) -> list[str]:
    """A line for each test set: mean and deviation over seeds, and whether it differs from vanilla.

    Args:
        found: of each method its outcomes, one for each seed that did not fail.
    """
    lines = []
    vanilla = found.get("vanilla", [])
    pair = [*vanilla, *found[method]]
    machine = {key: together(outcome["machine"][key] for outcome in pair) for key in pair[0]["machine"]}
    for name in TEST_SETS:
        texts = [outcome["translations"][name] for outcome in found[method]]
        scores = [score_text(text, references[name])[0] for text in texts]
        values = [score.value for score in scores]
        line = f"{name:13s}{method:15s}{statistics.mean(values):6.2f}"
        line += f" ± {statistics.stdev(values):.2f}" if len(values) > 1 else ""
        if method != "vanilla" and len(vanilla) == len(texts):
            base = chain(*(outcome["translations"][name] for outcome in vanilla))
            p = bootstrap([*base], [*chain(*texts)], references[name] * len(texts))
            run.add(
                "methods", method, {**recipe.setting(), "test": name}, p, "p", len(texts), machine=machine
            )
            line += f"  p = {p:.3f}"
        lines.append(f"{line}  {scores[0].signature}")
    return lines


if __name__ == "__main__":
    main()
