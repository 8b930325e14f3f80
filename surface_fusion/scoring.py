"""Compute named translation scores with sacreBLEU (Post, 2018, https://aclanthology.org/W18-6319).

The BLEU of a translation varies by several points depending on what is compared: plain text with the raw
reference (``sacreBLEU``), or space-separated tokens with a reference that is tokenised the same way
(``tokenised BLEU``, which fairseq-generate prints and most papers report). Each score has its name and
sacreBLEU's signature.

Romanian is written with comma-below letters (U+0219, U+021B), but much text has cedilla letters
(U+015F, U+0163) instead, and published scores differ by whether diacritics were kept: hence
``romanian=True``.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from sacrebleu.metrics.bleu import BLEU
from sacrebleu.metrics.chrf import CHRF

from surface_fusion.errors import SurfaceFusionError

CEDILLA_TO_COMMA = str.maketrans("şţŞŢ", "șțȘȚ")
BPE_MARKS = re.compile("@@( |$)|\u2581")
ESCAPES = re.compile("&(apos|quot|amp|#124|#91|#93);|@-@")

References = Sequence[str] | Sequence[Sequence[str]]  # one for each sentence, or several lists of them


@dataclass(frozen=True)
class Score:
    """One corpus-level score.

    Attributes:
        name: the kind of score.
        value: 0 to 100.
        signature: sacreBLEU's signature, which makes the score reproducible.
    """

    name: str
    value: float
    signature: str


def score(hypotheses: Sequence[str], references: References, romanian: bool = False) -> list[Score]:
    """Compute sacreBLEU, chrF and tokenised BLEU of *hypotheses*.

    Args:
        hypotheses: the translations, one string per sentence.
        references: one per sentence; or several lists, each with one reference per sentence.
        romanian: also score two variants of both sides: with comma-below instead of cedilla letters, and
            without diacritics.

    Raises:
        SurfaceFusionError: the numbers of lines differ, or there are none.
    """
    return score_text(hypotheses, references, romanian) + score_tokens(hypotheses, references, romanian)


def score_text(hypotheses: Sequence[str], references: References, romanian: bool = False) -> list[Score]:
    """Compute sacreBLEU and chrF of plain text, see :func:`score`."""
    return _scores({"sacreBLEU": BLEU(force=True), "chrF": CHRF()}, hypotheses, references, romanian)


def score_tokens(hypotheses: Sequence[str], references: References, romanian: bool = False) -> list[Score]:
    """Compute tokenised BLEU of the space-separated tokens of both sides, see :func:`score`."""
    metric = BLEU(tokenize="none", force=True)
    return _scores({"tokenised BLEU": metric}, hypotheses, references, romanian)


def _scores(
    metrics: dict[str, BLEU | CHRF], hypotheses: Sequence[str], references: References, romanian: bool
) -> list[Score]:
    single = all(isinstance(lines, str) for lines in references)
    reference_lists: Any = [references] if single else references
    for lines in reference_lists:
        if len(hypotheses) != len(lines):
            raise SurfaceFusionError(
                f"{len(hypotheses)} hypotheses but {len(lines)} references; give one reference line for each "
                "hypothesis line"
            )
    if not hypotheses:
        raise SurfaceFusionError("no line to score: the hypotheses and the references are empty")
    variants: dict[str, Callable[[str], str]] = {"": str}
    if romanian:
        variants = {
            ", text as is": str,
            ", comma-below s and t": comma_below,
            ", no diacritics": strip_diacritics,
        }
    scores = []
    for suffix, convert in variants.items():
        sides = [*map(convert, hypotheses)], [[*map(convert, lines)] for lines in reference_lists]
        for name, metric in metrics.items():
            value = metric.corpus_score(*sides).score
            scores.append(Score(name + suffix, value, str(metric.get_signature())))
    return scores


def comma_below(text: str) -> str:
    """Replace the cedilla of Romanian s and t in *text* by a comma below."""
    return unicodedata.normalize("NFC", text).translate(CEDILLA_TO_COMMA)


def strip_diacritics(text: str) -> str:
    """Remove all combining marks from *text*: ``ă â î ș ț`` become ``a a i s t``."""
    decomposed = unicodedata.normalize("NFD", text)
    return unicodedata.normalize("NFC", "".join(c for c in decomposed if not unicodedata.combining(c)))


def join_subwords(line: str) -> str:
    """Join the subwords of *line*: ``wo@@ rd`` (subword-nmt) or ``\u2581wo rd`` (sentencepiece).

    *line* may have several texts, separated by tabs, as a line of fairseq-generate.
    """
    if "\u2581" in line:
        line = re.sub("(^|\t) ", r"\1", line.replace(" ", "").replace("\u2581", " "))
    return re.sub("@@( |$)", "", line)


def text_warnings(hypotheses: Iterable[str]) -> list[str]:
    """Return warnings, one line each, about *hypotheses* that are not comparable with raw references."""
    hyps = list(hypotheses)
    warnings = []
    if marked := sum(bool(BPE_MARKS.search(line)) for line in hyps):
        warnings.append(
            f"{marked} of {len(hyps)} hypotheses contain BPE marks (@@ or \u2581); score with "
            "--remove-bpe, or translate with --remove-bpe (=sentencepiece)"
        )
    punctuated = [line for line in hyps if re.search("[.,]( |$)", line)]
    spaced = sum(bool(re.search(" [.,]( |$)", line)) for line in punctuated)
    escaped = sum(bool(ESCAPES.search(line)) for line in hyps)
    if 2 * spaced > len(punctuated) or escaped:
        warnings.append(
            f"the hypotheses look tokenised ({spaced} of {len(punctuated)} lines with a full stop or comma "
            f"have a space before it, {escaped} have escapes like &apos;); sacreBLEU and chrF are only "
            "comparable on detokenised text"
        )
    return warnings


@dataclass(frozen=True)
class GenerateOutput:
    """The translations in the output of fairseq-generate, in the order of the test set.

    Attributes:
        ids: index of each sentence in the test set, increasing.
        tokens: H- lines, the best hypothesis of each sentence before detokenisation.
        text: D- lines, the best hypotheses after fairseq's detokenisation (``--bpe``, ``--tokenizer``).
        tokenised_references: T- lines.
        skipped: indices up to the last id that have no translation.
    """

    ids: list[int]
    tokens: list[str]
    text: list[str]
    tokenised_references: list[str]
    skipped: list[int]


def parse_generate_output(lines: Iterable[str]) -> GenerateOutput:
    """Parse the output of fairseq-generate.

    If a sentence has several hypotheses (``--nbest``), the first is used.

    Raises:
        SurfaceFusionError: there is no H- line, or the sentences of H-, D- and T- lines differ.
    """
    texts: dict[str, dict[int, str]] = {"H": {}, "D": {}, "T": {}}
    for line in lines:
        if match := re.match(r"([HDT])-(\d+)\t(.*)", line, re.DOTALL):
            letter, sentence, text = match.groups()
            if letter != "T":
                text = text.partition("\t")[2]
            texts[letter].setdefault(int(sentence), text)
    if not texts["H"]:
        raise SurfaceFusionError("no H- line found; give the output of fairseq-generate")
    ids = sorted(texts["H"])
    for letter in "DT":
        if unpaired := texts[letter].keys() ^ texts["H"].keys():
            raise SurfaceFusionError(
                f"{len(ids)} H- lines but {len(texts[letter])} {letter}- lines: sentence {min(unpaired)} has "
                "only one of them; was the output cut off, or printed with --quiet or by interactive?"
            )
    hypotheses, text, references = ([texts[letter][i] for i in ids] for letter in "HDT")
    skipped = sorted(set(range(ids[-1])) - texts["H"].keys())
    return GenerateOutput(ids, hypotheses, text, references, skipped)
