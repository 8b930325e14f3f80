"""``surface-fusion score``: sacreBLEU, chrF and tokenised BLEU, each by its name."""

import dataclasses
import json
import sys
from collections.abc import Sequence

from surface_fusion import scoring
from surface_fusion.cli.user_errors import OneLineParser
from surface_fusion.errors import SurfaceFusionError

SUMMARY = "sacreBLEU, chrF and tokenised BLEU of a translation"


def _parser() -> OneLineParser:
    parser = OneLineParser(
        prog="surface-fusion score",
        description="Scores by sacreBLEU, each with its signature: sacreBLEU (13a) and chrF on plain text, "
        "and tokenised BLEU on the space-separated tokens as given.",
        usage="surface-fusion score --hyp FILE --ref FILE [flags]\n"
        "       surface-fusion score --generate-output FILE [--ref FILE] [flags]",
        allow_abbrev=False,
    )
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hyp", metavar="FILE", help="translations, one a line")
    source.add_argument(
        "--generate-output",
        metavar="FILE",
        help="what generate printed: tokenised BLEU of its H- lines against its T- lines, and with --ref "
        "sacreBLEU and chrF of its D- lines",
    )
    parser.add_argument("--ref", metavar="FILE", help="raw references, one a line")
    parser.add_argument(
        "--skipped-as-empty",
        action="store_true",
        help="with --generate-output: sentences that generate skipped count as empty translations of --ref",
    )
    parser.add_argument(
        "--romanian",
        action="store_true",
        help="score also with comma-below for cedilla letters, and without diacritics, on both sides",
    )
    parser.add_argument("--lang", metavar="CODE", help="target language; ro means --romanian")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    return parser


def run(argv: Sequence[str]) -> None:
    """Print the scores that the command line asks for."""
    parser = _parser()
    args = parser.parse_args(argv)
    romanian = args.romanian or args.lang == "ro"
    references = None if args.ref is None else _read_lines(args.ref)
    skipped: list[int] = []
    if args.hyp is not None:
        if references is None:
            parser.error("--hyp needs --ref")
        hypotheses = _read_lines(args.hyp)
        scores = scoring.score(hypotheses, references, romanian)
        count = len(hypotheses)
        warnings = scoring.text_warnings(hypotheses)
    else:
        output = scoring.parse_generate_output(_read_lines(args.generate_output))
        count, skipped = len(output.ids), output.skipped
        scores = []
        warnings = []
        if references is None:
            warnings.append("no sacreBLEU without the raw references; add --ref FILE")
        else:
            skipped = _skipped(output, len(references), args.skipped_as_empty)
            text = dict(zip(output.ids, output.text, strict=True))
            hypotheses = [text.get(i, "") for i in range(len(references))]
            scores = scoring.score_text(hypotheses, references, romanian)
            warnings += scoring.text_warnings(output.text)
        scores += scoring.score_tokens(output.tokens, output.tokenised_references, romanian)
        if skipped:
            warnings.append(f"generate skipped {_named(skipped)}: left out of tokenised BLEU")
    for warning in warnings:
        print(f"surface-fusion score: warning: {warning}", file=sys.stderr)
    if args.json:
        print(
            json.dumps(
                {
                    "sentences": count,
                    "skipped": skipped,
                    "warnings": warnings,
                    "scores": [dataclasses.asdict(one) for one in scores],
                }
            )
        )
        return
    width = max(len(one.name) for one in scores)
    for one in scores:
        print(f"{one.name:<{width}}  {one.value:6.2f}  {one.signature}")


def _read_lines(path: str) -> list[str]:
    """The lines of *path*, split at line feeds only."""
    try:
        with open(path, encoding="utf-8", newline="\n") as file:
            return [line.rstrip("\r\n") for line in file]
    except UnicodeDecodeError as error:
        raise SurfaceFusionError(f"{path} is not UTF-8 text: {error.reason} at byte {error.start}") from error


def _skipped(output: scoring.GenerateOutput, references: int, as_empty: bool) -> list[int]:
    """The sentences without a translation among *references*.

    Raises:
        SurfaceFusionError: there are some, and the user did not say what they count.
    """
    skipped = sorted(set(range(references)) - set(output.ids))
    if len(output.ids) + len(skipped) != references or (skipped and not as_empty):
        without = f", without {_named(skipped)} (--skipped-as-empty scores these as empty)" if skipped else ""
        raise SurfaceFusionError(
            f"{references} reference lines but {len(output.ids)} translated sentences{without}; give the "
            "references of that test set"
        )
    return skipped


def _named(sentences: list[int]) -> str:
    """Sentence numbers in words, the first few by their number (generate counts from 0)."""
    shown = ", ".join(map(str, sentences[:10])) + (", ..." if len(sentences) > 10 else "")
    return f"{len(sentences)} sentence{'s' if len(sentences) > 1 else ''} ({shown})"
