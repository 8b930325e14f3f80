"""``surface-fusion score``: compute sacreBLEU, chrF and tokenised BLEU."""

import dataclasses
import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from surface_fusion import scoring
from surface_fusion.cli.user_errors import OneLineParser
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.io.lines import read_lines


def _parser() -> OneLineParser:
    parser = OneLineParser(
        "score",
        "--hyp FILE --ref FILE ... [flags]",
        "--generate-output FILE [--ref FILE ...] [flags]",
        description="Computes scores with sacreBLEU and prints their signatures: sacreBLEU (13a) and chrF on "
        "plain text, tokenised BLEU on the space-separated tokens as given.",
    )
    add = parser.add_argument
    source = parser.add_mutually_exclusive_group(required=True)
    source.add_argument("--hyp", metavar="FILE", help="translations, one per line")
    source.add_argument(
        "--generate-output",
        metavar="FILE",
        help="output of generate: tokenised BLEU of its H- lines against its T- lines, and with --ref "
        "sacreBLEU and chrF of its D- lines",
    )
    add(
        "--ref",
        metavar="FILE",
        action="append",
        help="raw references, one per line; repeat the flag for several references per line",
    )
    add("--remove-bpe", action="store_true", help="join subwords first: wo@@ rd, or \u2581wo rd")
    add(
        "--skipped-as-empty",
        action="store_true",
        help="with --generate-output: score sentences that generate skipped as empty translations",
    )
    add(
        "--romanian",
        action="store_true",
        help="also score both sides with comma-below instead of cedilla letters, and without diacritics",
    )
    add("--lang", metavar="CODE", help="target language; ro means --romanian")
    add("--json", action="store_true", help="print one JSON object")
    return parser


@dataclass
class _Report:
    """The scores and warnings to print; its fields are the keys of ``--json``."""

    sentences: int
    skipped: list[int]
    warnings: list[str]
    scores: list[scoring.Score]


def run(argv: Sequence[str]) -> None:
    """Compute and print the scores."""
    parser = _parser()
    args = parser.parse_args(argv)
    romanian = args.romanian or args.lang == "ro"
    if args.hyp is not None and args.ref is None:
        parser.error("--hyp needs --ref")
    references = _read_references(args.ref or [])
    lines = read_lines(args.hyp or args.generate_output)
    if args.remove_bpe:
        lines = [*map(scoring.join_subwords, lines)]
        references = [[*map(scoring.join_subwords, of_file)] for of_file in references]
    if args.hyp is not None:
        hypotheses = lines
        scores = scoring.score(hypotheses, references, romanian)
        report = _Report(len(hypotheses), [], scoring.text_warnings(hypotheses), scores)
    else:
        output = scoring.parse_generate_output(lines)
        report = _report_on_generate(output, references, romanian, args.skipped_as_empty)
    for warning in report.warnings:
        print(f"surface-fusion score: warning: {warning}", file=sys.stderr)
    if args.json:
        print(json.dumps(dataclasses.asdict(report)))
        return
    width = max(len(score.name) for score in report.scores)
    for score in report.scores:
        print(f"{score.name:<{width}}  {score.value:6.2f}  {score.signature}")


def _report_on_generate(
    output: scoring.GenerateOutput, references: list[list[str]], romanian: bool, skipped_as_empty: bool
) -> _Report:
    """Score the tokens of *output*, and its text if there are *references*."""
    if not references:
        skipped, scores = output.skipped, []
        warnings = ["no sacreBLEU without the raw references; add --ref FILE"]
    else:
        skipped = _skipped(output, len(references[0]), skipped_as_empty)
        text = dict(zip(output.ids, output.text, strict=True))
        hypotheses = [text.get(i, "") for i in range(len(references[0]))]
        scores = scoring.score_text(hypotheses, references, romanian)
        warnings = scoring.text_warnings(output.text)
    scores += scoring.score_tokens(output.tokens, output.tokenised_references, romanian)
    if skipped:
        warnings.append(f"generate skipped {_listed(skipped)}: left out of tokenised BLEU")
    return _Report(len(output.ids), skipped, warnings, scores)


def _read_references(paths: list[str]) -> list[list[str]]:
    """Read the lines of each file; the files must have the same number of lines."""
    references = [read_lines(path) for path in paths]
    for path, lines in zip(paths, references, strict=True):
        if len(lines) != len(references[0]):
            raise SurfaceFusionError(
                f"--ref {path} has {len(lines)} lines, but {paths[0]} has {len(references[0])}; give one "
                "line for each hypothesis in every file"
            )
    return references


def _skipped(output: scoring.GenerateOutput, references: int, as_empty: bool) -> list[int]:
    """Return the indices of sentences without a translation, which only ``--skipped-as-empty`` accepts."""
    skipped = sorted(set(range(references)) - set(output.ids))
    if len(output.ids) + len(skipped) != references or (skipped and not as_empty):
        without = f", without {_listed(skipped)} (--skipped-as-empty scores them as empty)" if skipped else ""
        raise SurfaceFusionError(
            f"{references} reference lines but {len(output.ids)} translated sentences{without}; give the "
            "references of that test set"
        )
    return skipped


def _listed(sentences: list[int]) -> str:
    """Format the number of sentences and the first few of their indices."""
    shown = ", ".join(map(str, sentences[:10])) + (", ..." if len(sentences) > 10 else "")
    return f"{len(sentences)} sentence{'s' if len(sentences) > 1 else ''} ({shown})"
