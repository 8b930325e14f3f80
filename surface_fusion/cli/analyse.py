"""``surface-fusion analyse VERB CHECKPOINT DATA -o DIR``: figures and tables about a trained model."""

import sys
from collections.abc import Sequence
from pathlib import Path

from surface_fusion.analysis import ablation, align, branches, embeddings, layers
from surface_fusion.analysis.figures import pyplot
from surface_fusion.analysis.loaded import load
from surface_fusion.analysis.report import write_report
from surface_fusion.cli.checkpoint_flags import add_checkpoint_flags, import_user_dir, trusted_checkpoints
from surface_fusion.cli.user_errors import OneLineParser
from surface_fusion.errors import SurfaceFusionError

VERBS = {
    "layers": "weight of each encoder layer in the fusion (figure 1 of the paper)",
    "ablate": "BLEU and length with one encoder layer removed from the fusion (figure 2)",
    "embeddings": "singular values, PCA and bilingual neighbours of the embeddings",
    "branches": "predictions of the two branches of surface fusion, token by token (CSV only)",
    "align": "attention of each target token of a sentence pair to the source",
    "all": "all of these that the model supports",
}


def _parser() -> OneLineParser:
    parser = OneLineParser(
        "analyse",
        "VERB CHECKPOINT DATA -o DIR [flags]",
        description="Writes PNG, SVG and CSV files, and report.html with everything in the folder. "
        + " ".join(f"{verb}: {summary}." for verb, summary in VERBS.items()),
    )
    add = parser.add_argument
    add("verb", choices=VERBS, metavar="VERB", help=", ".join(VERBS))
    add("checkpoint", metavar="CHECKPOINT")
    add("data", metavar="DATA", help="data folder written by preprocess")
    add("-o", "--output", required=True, metavar="DIR", type=Path, help="output folder")
    add("--split", default="test", help="split of the data; default: test")
    add("--beam", type=int, default=4, metavar="N", help="ablate: beam size; default: 4")
    add(
        "--remove-bpe",
        nargs="?",
        const="@@ ",
        metavar="SYMBOL",
        help="ablate: how to join subwords, as in generate (default: detected from the dictionary)",
    )
    add("--against", metavar="CHECKPOINT", help="embeddings: another model with the same dictionaries")
    add("--sentence", type=int, default=0, metavar="I", help="align: index of the sentence; default: 0")
    add("--cpu", action="store_true", help="use the CPU even if a GPU is available")
    add_checkpoint_flags(parser)
    return parser


def run(argv: Sequence[str]) -> None:
    """Run the analyses and print the paths of the files that they write."""
    parser = _parser()
    args = parser.parse_args(argv)
    import_user_dir(args.user_dir)
    if args.beam < 1:
        parser.error(f"--beam {args.beam}: give 1 or more")
    pyplot()  # raises if matplotlib is missing: before the analyses, which take long
    with trusted_checkpoints(args.trust_checkpoint):
        loaded = load(args.checkpoint, args.data, args.split, args.cpu)
        against = load(args.against, args.data, args.split, args.cpu) if args.against else None
    analyses = {
        "layers": lambda: layers.draw(loaded, args.output),
        "ablate": lambda: ablation.draw(loaded, args.output, args.beam, args.remove_bpe),
        "embeddings": lambda: embeddings.draw(loaded, args.output, against),
        "branches": lambda: branches.write(loaded, args.output),
        "align": lambda: align.draw(loaded, args.output, args.sentence),
    }
    paths = []
    for verb in analyses if args.verb == "all" else [args.verb]:
        try:
            paths += analyses[verb]()
        except SurfaceFusionError as error:
            if args.verb != "all":
                raise
            print(f"{verb}: {error}", file=sys.stderr)
    for path in [*paths, write_report(args.output, Path(args.checkpoint).name)]:
        print(path)
