"""Table ``tune``: BLEU of the plain Transformer on the validation text, by size, dropout and learning rate.

    python scripts/bench/tune.py TEXT --work DIR --jobs 8 --dropout 0.2 0.3 --lr 5e-4 1e-3 --size small base
    python scripts/bench/tune.py --quick            tiny, on the CPU if there is no GPU

It determines the recipe of ``methods.py`` without using a fusion method or a test set. TEXT, DIR and flags
are those of ``methods.py``.
"""

import argparse
from itertools import product

from contenders import FAST, SIZES, on_gpus
from experiment import Recipe, parse_flags, prepare, read_references, train_and_translate, work_folder
from results import Run, learning_rate, positive, probability

from surface_fusion.scoring import Score, score_text


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--size", nargs="+", choices=SIZES, help="default: base")
    parser.add_argument("--norm", nargs="+", choices=("pre", "post"), default=["pre"])
    parser.add_argument("--dropout", type=probability, nargs="+", default=[0.1, 0.3])
    parser.add_argument("--lr", type=learning_rate, nargs="+", default=[1e-3])
    parser.add_argument("--seed", type=positive, default=1)
    args = parse_flags(parser, "tune")
    sizes = args.size or (["tiny"] if args.quick else ["base"])
    fixed = (args.updates, args.max_tokens, args.dtype[0], args.vocab)
    grid = dict.fromkeys(product(sizes, args.norm, args.dropout, args.lr))
    recipes = [Recipe("en", "ro", size, norm, dropout, lr, *fixed) for size, norm, dropout, lr in grid]

    run = Run("tune", args.out, args.cpu)
    names = {recipe: f"tune-{recipe.size}-{recipe.norm}-{recipe.dropout}-{recipe.lr}" for recipe in recipes}
    with work_folder(args.work, ("en", "ro"), names.values() if args.score_only else None) as folder:
        data = prepare(args.text, folder, ("en", "ro"), args.vocab, args.files)
        references = read_references("valid", "ro", args)

        def measure(recipe: Recipe, device: int | None) -> Score:
            outcome = train_and_translate(
                *(FAST, args.seed, recipe, ["valid"], data, folder / names[recipe]),
                **args.train_options,
                device=device,
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
