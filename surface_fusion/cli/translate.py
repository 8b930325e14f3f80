"""``surface-fusion translate MODEL_DIR``: translate raw text from standard input, line by line."""

import io
import logging
import math
import sys
import textwrap
from collections.abc import Sequence
from pathlib import Path

from surface_fusion.cli.checkpoint_flags import add_checkpoint_flags, import_user_dir, trusted_checkpoints
from surface_fusion.cli.user_errors import OneLineParser
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.inference.translator import Translation, Translator
from surface_fusion.io.lines import batches_of_lines


def _parser() -> OneLineParser:
    parser = OneLineParser(
        "translate",
        "MODEL_DIR [flags] < TEXT",
        description="Translates each line of standard input to a line of standard output. MODEL_DIR (or its "
        "subfolders checkpoints, data-bin, pieces) holds checkpoint_best.pt or checkpoint_last.pt, the two "
        "dict.*.txt, and what segmented the training text: a sentencepiece model *.model, codes of "
        "subword-nmt (bpe.codes), or nothing if the dictionaries have no subwords.",
    )
    add = parser.add_argument
    add("folder", metavar="MODEL_DIR", type=Path, help="folder of the model, such as runs/demo")
    add("--checkpoint", metavar="NAME", help="name of another checkpoint in the folder")
    add("--beam", type=int, default=4, metavar="N", help="beam size; default: 4")
    add(
        "--nbest",
        type=int,
        default=1,
        metavar="N",
        help="print N translations of each line, the best first; an empty line for each that was not found",
    )
    add("--scores", action="store_true", help="print the score and a tab before each translation")
    add(
        "--lenpen",
        type=float,
        default=1.0,
        metavar="X",
        help="exponent of the length that scores are divided by; more favours long translations; default: 1",
    )
    add("--batch-size", type=int, default=64, metavar="N", help="lines to translate at once; default: 64")
    add(
        "--moses",
        action="store_true",
        help="tokenise lines and detokenise translations by sacremoses, if the training text was tokenised",
    )
    add(
        "--explain",
        action="store_true",
        help="print a table below each translation: the prediction of each branch for each token, and the "
        "source token with the most attention",
    )
    add(
        "-o",
        "--out",
        type=Path,
        metavar="DIR",
        help="--explain: also write tables and heat maps, DIR/1 for line 1",
    )
    add("--cpu", action="store_true", help="use the CPU even if a GPU is available")
    add_checkpoint_flags(parser)
    return parser


def _print(translation: Translation, with_score: bool) -> None:
    print(f"{translation.score:.4f}\t{translation.text}" if with_score else translation.text, flush=True)


def run(argv: Sequence[str]) -> None:
    """Translate standard input."""
    parser = _parser()
    args = parser.parse_args(argv)
    import_user_dir(args.user_dir)
    for name, value in (("--beam", args.beam), ("--batch-size", args.batch_size)):
        if value < 1:
            parser.error(f"{name} {value}: give 1 or more")
    if not 1 <= args.nbest <= args.beam:
        parser.error(f"--nbest {args.nbest} with --beam {args.beam}: give a number from 1 to {args.beam}")
    if args.out is not None and not args.explain:
        parser.error("-o needs --explain")
    if args.out is not None and args.nbest > 1:
        parser.error(f"-o with --nbest {args.nbest}: the files are those of one translation; leave one out")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        parser.error(f"-o {args.out} is a file; give a folder")
    if sys.stdin is None:
        raise SurfaceFusionError("standard input is closed; give the text there, as in: < TEXT")
    if sys.stdout is None:
        raise SurfaceFusionError("standard output is closed; the translations go there, as in: > FILE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as the input, independent of the locale
    logging.basicConfig(format="surface-fusion translate: %(message)s")  # for warnings about single lines
    with trusted_checkpoints(args.trust_checkpoint):
        translator = Translator(
            args.folder,
            args.checkpoint,
            device="cpu" if args.cpu else None,
            batch_size=args.batch_size,
            moses=args.moses,
        )
    nothing, number = Translation("", -math.inf, [], [], []), 0
    at_once = 1 if args.explain or sys.stdin.isatty() else args.batch_size
    for lines in batches_of_lines(sys.stdin, at_once):
        results = translator.nbest(
            lines, args.nbest, beam=args.beam, lenpen=args.lenpen, first_line=number + 1
        )
        for line, found in zip(lines, results, strict=True):
            number += 1
            for translation in [*found, *[nothing] * (args.nbest - len(found))]:
                _print(translation, args.scores)
                if args.explain and translation.score > -math.inf:
                    table = translator.explain(line, translation, args.out and args.out / str(number))
                    print(textwrap.indent(table, "    "), flush=True)
