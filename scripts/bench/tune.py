"""Table ``tune``: the plain Transformer on the validation text, over sizes, dropouts and learning rates.

    python scripts/bench/tune.py TEXT --work DIR --jobs 8 --dropout 0.2 0.3 --lr 5e-4 1e-3 --size small base
    python scripts/bench/tune.py --quick            tiny, on the CPU if there is no GPU

It chooses the recipe of ``methods.py``, whose TEXT, DIR and flags it shares: no method of fusion and no test
set is looked at.
"""

import argparse
from itertools import product

from contenders import FAST, SIZES, on_gpus
from experiment import Recipe, parse, prepare, references_of, train_and_translate, work_folder
from results import Run, positive, probability, rate

from surface_fusion.scoring import Score, score_text


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", nargs="+", choices=SIZES, help="default: base")
    parser.add_argument("--norm", nargs="+", choices=("pre", "post"), default=["pre"])
    parser.add_argument("--dropout", type=probability, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--lr", type=rate, nargs="+", default=[1e-3])
    parser.add_argument("--seed", type=positive, default=1)
    args = parse(parser, "tune")
    sizes = args.size or (["tiny"] if args.quick else ["base"])
    rest = (args.updates, args.max_tokens, args.dtype[0], args.vocab)
    grid = dict.fromkeys(product(sizes, args.norm, args.dropout, args.lr))
    recipes = [Recipe("en", "ro", size, norm, dropout, lr, *rest) for size, norm, dropout, lr in grid]

    run = Run("tune", args.out, args.cpu)
    places = {recipe: f"tune-{recipe.size}-{recipe.norm}-{recipe.dropout}-{recipe.lr}" for recipe in recipes}
    held = places.values() if args.score_only else None
    with work_folder(args.work, ("en", "ro"), held) as folder:
        data = prepare(args.text, folder, ("en", "ro"), args.vocab, args.files)
        references = references_of("valid", "ro", args)

        def measure(recipe: Recipe, device: int | None) -> Score:
            place = folder / places[recipe]
            outcome = train_and_translate(
                *(FAST, args.seed, recipe, ["valid"], data, place), **args.place, device=device
            )
            score = score_text(outcome["translations"]["valid"], references)[0]
            row = {**recipe.setting(), "test": "valid", "seed": args.seed}
            run.add("tune", "vanilla", row, score.value, "BLEU", machine=outcome["machine"])
            return score

        scores = list(on_gpus(measure, recipes, at_once=args.jobs))
    best = max(range(len(recipes)), key=lambda i: scores[i].value)
    print(f"best: {recipes[best]}: {scores[best].value:.2f} {scores[best].signature}")


if __name__ == "__main__":
    main()
