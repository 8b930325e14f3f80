"""Scores are sacreBLEU's, each under its own name."""

import pytest
import sacrebleu

from surface_fusion import SurfaceFusionError, scoring

HYPS = ["Tom își face noi prieteni.", "Casa e mare.", "El vine acasă repede, azi."]
REFS = ["Tom își face prieteni noi.", "Casa este mare.", "El vine repede acasă, azi."]
TOKENISED_HYPS = ["Tom își face noi prieteni .", "Casa e mare .", "El vine acasă repede , azi ."]


def by_name(scores):
    assert len({one.name for one in scores}) == len(scores)
    return {one.name: one.value for one in scores}


def test_flavours_are_sacrebleus_and_differ():
    scores = scoring.score(HYPS, REFS)
    assert [one.name for one in scores] == ["sacreBLEU", "chrF", "tokenised BLEU"]
    values = by_name(scores)
    assert values["sacreBLEU"] == pytest.approx(sacrebleu.corpus_bleu(HYPS, [REFS]).score, abs=1e-9)
    assert values["chrF"] == pytest.approx(sacrebleu.corpus_chrf(HYPS, [REFS]).score, abs=1e-9)
    tokenised = sacrebleu.corpus_bleu(HYPS, [REFS], tokenize="none", force=True).score
    assert values["tokenised BLEU"] == pytest.approx(tokenised, abs=1e-9)
    assert abs(values["sacreBLEU"] - values["tokenised BLEU"]) > 1


def test_signatures_say_the_tokeniser_and_the_version():
    bleu, chrf, tokenised = (one.signature for one in scoring.score(HYPS, REFS))
    assert "tok:13a" in bleu and f"version:{sacrebleu.__version__}" in bleu
    assert "nc:6" in chrf
    assert "tok:none" in tokenised


def test_bleu_by_hand():
    # 6 tokens, 5 of them right: n-gram precisions 5/6, 4/5, 3/4, 2/3, no brevity penalty.
    (score,) = scoring.score_tokens(["a b c d e f"], ["a b c d e g"])
    assert score.value == pytest.approx(100 * (5 / 6 * 4 / 5 * 3 / 4 * 2 / 3) ** 0.25, abs=1e-9)


def test_perfect_translation_scores_100_in_every_flavour():
    assert [one.value for one in scoring.score(REFS, REFS, romanian=True)] == pytest.approx([100] * 9)


def test_romanian_scores_as_is_comma_below_and_without_diacritics():
    cedilla = [line.replace("ș", "ş") for line in REFS]
    bare = ["Tom isi face prieteni noi.", "Casa este mare.", "El vine repede acasa, azi."]
    of_cedilla = by_name(scoring.score(cedilla, REFS, romanian=True))
    assert of_cedilla["sacreBLEU, text as is"] < 90
    assert of_cedilla["sacreBLEU, comma-below s and t"] == pytest.approx(100)
    of_bare = by_name(scoring.score(bare, REFS, romanian=True))
    assert of_bare["sacreBLEU, comma-below s and t"] < 90
    assert of_bare["sacreBLEU, no diacritics"] == pytest.approx(100)
    assert of_bare["chrF, no diacritics"] == pytest.approx(100)
    assert of_bare["tokenised BLEU, no diacritics"] == pytest.approx(100)


@pytest.mark.parametrize(
    "text, comma, bare",
    [
        ("Ştiinţa ŢĂRII", "Știința ȚĂRII", "Stiinta TARII"),
        ("s\u0327i t\u0327ara", "și țara", "si tara"),
        ("în câine", "în câine", "in caine"),
        ("plain, 12 %", "plain, 12 %", "plain, 12 %"),
    ],
)
def test_romanian_letters(text, comma, bare):
    assert scoring.comma_below(text) == comma
    assert scoring.strip_diacritics(text) == bare


def test_different_numbers_of_lines_are_refused_with_both():
    with pytest.raises(SurfaceFusionError, match="3 hypotheses but 2 references"):
        scoring.score(HYPS, REFS[:2])


def test_nothing_to_score_is_refused():
    with pytest.raises(SurfaceFusionError, match="no line to score"):
        scoring.score([], [])


@pytest.mark.parametrize(
    "hyps",
    [HYPS, ["Je suis là !", "Qui ? Moi : non."], ["3.5 %", "a, b"], ["no stop at all"], ["mail a@@b.ro"], []],
)
def test_plain_text_draws_no_warning(hyps):
    assert scoring.text_warnings(hyps) == []


@pytest.mark.parametrize(
    "hyps, words",
    [
        (TOKENISED_HYPS, "look tokenised (3 of 3"),
        (["il n&apos;y a rien"], "1 have escapes"),
        (["well @-@ known"], "look tokenised"),
        (["pri@@ eteni", "casă"], "1 of 2 hypotheses contain BPE marks"),
        (["noi prie@@"], "BPE marks"),
        (["▁Casa ▁mare"], "BPE marks"),
    ],
)
def test_tokenised_text_and_bpe_marks_are_noticed(hyps, words):
    (warning,) = scoring.text_warnings(hyps)
    assert words in warning and "\n" not in warning


GENERATED = """\
2026-01-01 00:00:00 | INFO | fairseq_cli.generate | loading model(s)
S-3	a b .
T-3	x y .
H-3	-0.25	x z .
D-3	-0.25	x z.
P-3	-0.1 -0.2
H-3	-0.9	second best
D-3	-0.9	second best
S-0	c
T-0	u
H-0	-0.5	u
D-0	-0.5	u
Generate test with beam=5: BLEU4 = 0.00
"""


def test_generate_output_is_sorted_by_sentence_and_keeps_the_best():
    output = scoring.parse_generate_output(GENERATED.splitlines())
    assert output == scoring.GenerateOutput(
        ids=[0, 3],
        tokens=["u", "x z ."],
        text=["u", "x z."],
        tokenised_references=["u", "x y ."],
        skipped=[1, 2],
    )


def test_empty_translations_are_kept():
    output = scoring.parse_generate_output(["T-0\t", "H-0\t-1.0\t", "D-0\t-1.0\t"])
    assert (output.tokens, output.text, output.tokenised_references) == ([""], [""], [""])


@pytest.mark.parametrize(
    "lines, words",
    [
        ([], "no H- line"),
        (["H-0\t-1\ta", "D-0\t-1\ta"], "1 H- lines but 0 T- lines"),
        (["H-0\t-1\ta", "D-0\t-1\ta", "T-0\ta", "T-7\tb"], "1 H- lines but 2 T- lines: sentence 7"),
        (["H-0\t-1\ta", "T-0\ta"], "1 H- lines but 0 D- lines"),
    ],
)
def test_output_that_was_cut_off_is_refused(lines, words):
    with pytest.raises(SurfaceFusionError, match=words):
        scoring.parse_generate_output(lines)
