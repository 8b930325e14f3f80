"""``surface-fusion score``: what is printed, and what is refused."""

import json
import re

import pytest
import sacrebleu

HYPS = ["Tom își face noi prieteni.", "Casa e mare.", "El vine acasă, azi."]
REFS = ["Tom îşi face prieteni noi.", "Casa este mare.", "El vine acasă, azi."]


@pytest.fixture
def texts(tmp_path):
    """Paths of the hypotheses and of the references."""
    paths = tmp_path / "hyp.txt", tmp_path / "ref.txt"
    for path, lines in zip(paths, (HYPS, REFS), strict=True):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    return paths


def test_three_named_scores_with_signatures(command, texts):
    result = command("score", "--hyp", texts[0], "--ref", texts[1])
    assert (result.status, result.err) == (0, "")
    bleu = sacrebleu.corpus_bleu(HYPS, [REFS])
    lines = result.out.splitlines()
    assert [line.split("  ")[0] for line in lines] == ["sacreBLEU", "chrF", "tokenised BLEU"]
    assert f"{bleu.score:.2f}" in lines[0] and "tok:13a" in lines[0]
    assert "nc:6" in lines[1] and "tok:none" in lines[2]


@pytest.mark.parametrize("flags", [("--romanian",), ("--lang", "ro")])
def test_romanian_prints_every_version_of_the_text(command, texts, flags):
    names = [
        line.split("  ")[0]
        for line in command("score", "--hyp", texts[0], "--ref", texts[1], *flags).out.splitlines()
    ]
    versions = (", text as is", ", comma-below s and t", ", no diacritics")
    assert sorted(names) == sorted(
        flavour + version for flavour in ("sacreBLEU", "chrF", "tokenised BLEU") for version in versions
    )


def test_other_languages_are_scored_as_they_are(command, texts):
    assert len(command("score", "--hyp", texts[0], "--ref", texts[1], "--lang", "de").out.splitlines()) == 3


def test_json_contains_scores_and_warnings(command, texts):
    facts = json.loads(command("score", "--hyp", texts[0], "--ref", texts[1], "--json").out)
    assert facts["sentences"] == 3 and facts["warnings"] == [] and facts["skipped"] == []
    bleu = sacrebleu.corpus_bleu(HYPS, [REFS]).score
    assert facts["scores"][0]["name"] == "sacreBLEU"
    assert facts["scores"][0]["value"] == pytest.approx(bleu, abs=1e-9)
    assert "version:" in facts["scores"][0]["signature"]


def test_tokenised_hypotheses_cause_one_warning(command, texts):
    texts[0].write_text("Casa e mare .\nEl vine .\nTom , da .\n", encoding="utf-8")
    result = command("score", "--hyp", texts[0], "--ref", texts[1])
    assert result.status == 0
    assert result.err.startswith("surface-fusion score: warning: the hypotheses look tokenised")
    assert result.err.count("\n") == 1


@pytest.mark.parametrize(
    "hyps, words",
    [
        ("one\ntwo\n", "2 hypotheses but 3 references"),
        ("", "0 hypotheses but 3 references"),
        ("a\nb\nc\n\n", "4 hypotheses but 3 references"),
        ("a\u2028still a\nb\nc\x0b\nd", "4 hypotheses but 3 references"),
    ],
)
def test_different_numbers_of_lines_are_refused(command, texts, hyps, words):
    texts[0].write_text(hyps, encoding="utf-8")
    result = command("score", "--hyp", texts[0], "--ref", texts[1])
    assert (result.status, result.out) == (2, "")
    assert words in result.err and result.err.count("\n") == 1


def test_windows_line_ends_change_nothing(command, texts):
    plain = command("score", "--hyp", texts[0], "--ref", texts[1]).out
    texts[0].write_bytes(texts[0].read_bytes().replace(b"\n", b"\r\n"))
    assert command("score", "--hyp", texts[0], "--ref", texts[1]).out == plain


@pytest.mark.parametrize(
    "argv, words",
    [
        ((), "one of the arguments --hyp --generate-output is required"),
        (("--hyp", "hyp.txt"), "--hyp needs --ref"),
        (("--hyp", "hyp.txt", "--ref", "nowhere.txt"), "nowhere.txt: No such file or directory"),
        (("--hyp", "latin1.txt", "--ref", "ref.txt"), "latin1.txt is not UTF-8 text: "),
        (("--generate-output", "hyp.txt"), "no H- line found"),
        (("--hyp", "hyp.txt", "--ref", "ref.txt", "--bogus"), "unrecognized arguments: --bogus"),
    ],
)
def test_bad_input_is_one_line(command, texts, argv, words):
    (texts[0].parent / "latin1.txt").write_bytes("été\n".encode("latin-1"))
    result = command("score", *argv)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("surface-fusion score: error: ") and words in result.err
    assert result.err.count("\n") == 1


@pytest.fixture
def generated(tmp_path):
    """What generate printed for sentences 2 and 0 of three."""
    path = tmp_path / "generated.txt"
    lines = []
    for sentence in (2, 0):
        tokens = HYPS[sentence].replace(".", " .").replace(",", " ,")
        reference = REFS[sentence].replace(".", " .").replace(",", " ,")
        lines += [
            f"T-{sentence}\t{reference}",
            f"H-{sentence}\t-0.5\t{tokens}",
            f"D-{sentence}\t-0.5\t{HYPS[sentence]}",
        ]
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")
    return path


def test_generate_output_alone_gives_tokenised_bleu_and_says_so(command, generated):
    result = command("score", "--generate-output", generated)
    assert result.status == 0
    assert [line.split("  ")[0] for line in result.out.splitlines()] == ["tokenised BLEU"]
    assert result.err.splitlines() == [
        "surface-fusion score: warning: no sacreBLEU without the raw references; add --ref FILE",
        "surface-fusion score: warning: generate skipped 1 sentence (1): left out of tokenised BLEU",
    ]


def test_skipped_sentences_are_named_and_refused(command, generated, texts):
    result = command("score", "--generate-output", generated, "--ref", texts[1])
    assert (result.status, result.out) == (2, "")
    assert "3 reference lines but 2 translated sentences, without 1 sentence (1)" in result.err
    assert "--skipped-as-empty" in result.err and result.err.count("\n") == 1


def test_skipped_as_empty_scores_skipped_sentences_as_empty(command, generated, texts):
    result = command(
        "score", "--generate-output", generated, "--ref", texts[1], "--skipped-as-empty", "--json"
    )
    facts = json.loads(result.out)
    with_a_gap = sacrebleu.corpus_bleu([HYPS[0], "", HYPS[2]], [REFS]).score
    assert facts["scores"][0]["value"] == pytest.approx(with_a_gap, abs=1e-9)
    assert facts["skipped"] == [1] and facts["sentences"] == 2
    assert any("generate skipped 1 sentence (1)" in warning for warning in facts["warnings"])


def test_fewer_references_than_translations_are_refused(command, generated, texts):
    texts[1].write_text("one\n", encoding="utf-8")
    result = command("score", "--generate-output", generated, "--ref", texts[1], "--skipped-as-empty")
    assert result.status == 2
    assert "1 reference lines but 2 translated sentences; give the references" in result.err


def test_a_byte_order_mark_is_ignored(command, texts):
    hyp, ref = texts
    ref.write_text("\ufeff" + hyp.read_text(encoding="utf-8"), encoding="utf-8")
    result = command("score", "--hyp", hyp, "--ref", ref, "--json")
    assert json.loads(result.out)["scores"][0]["value"] == pytest.approx(100)


def test_several_references_per_line_are_scored(command, texts, generated):
    """sacreBLEU's own, of both files together."""
    hyp, ref = texts
    other = ref.with_name("other.txt")
    others = ["Tom face noi prieteni.", "O casa mare.", "El vine azi acas\u0103."]
    other.write_text("".join(f"{line}\n" for line in others), encoding="utf-8")
    facts = json.loads(command("score", "--hyp", hyp, "--ref", ref, "--ref", other, "--json").out)
    bleu = sacrebleu.corpus_bleu(HYPS, [REFS, others])
    chrf = sacrebleu.corpus_chrf(HYPS, [REFS, others])
    tokens = sacrebleu.corpus_bleu(HYPS, [REFS, others], tokenize="none", force=True)
    values = [score["value"] for score in facts["scores"]]
    assert values == pytest.approx([bleu.score, chrf.score, tokens.score], abs=1e-9)
    assert all("nrefs:2|" in score["signature"] for score in facts["scores"])
    flags = ("--generate-output", generated, "--skipped-as-empty", "--ref", ref, "--ref", other, "--json")
    facts = json.loads(command("score", *flags).out)
    with_a_gap = sacrebleu.corpus_bleu([HYPS[0], "", HYPS[2]], [REFS, others]).score
    assert facts["scores"][0]["value"] == pytest.approx(with_a_gap, abs=1e-9)
    assert [re.findall(r"nrefs:\d", score["signature"]) for score in facts["scores"]] == [
        ["nrefs:2"],
        ["nrefs:2"],
        ["nrefs:1"],
    ]


def test_references_of_different_lengths_are_refused(command, texts):
    other = texts[1].with_name("other.txt")
    other.write_text("one\n", encoding="utf-8")
    result = command("score", "--hyp", texts[0], "--ref", texts[1], "--ref", other)
    assert result.status == 2 and result.err.count("\n") == 1
    assert f"--ref {other} has 1 lines, but {texts[1]} has 3" in result.err


@pytest.mark.parametrize(
    "subwords",
    [
        ["T@@ om is always he@@ re.", "Good@@ bye"],
        ["\u2581T om \u2581is \u2581always \u2581he re.", "\u2581Good bye"],
    ],
)
def test_remove_bpe_joins_subwords(command, texts, tmp_path, subwords):
    words = ["Tom is always here.", "Goodbye"]
    for path, lines in ((texts[0], subwords), (texts[1], words)):
        path.write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    result = command("score", "--hyp", texts[0], "--ref", texts[1], "--remove-bpe")
    assert result.err == "" and "  100.00  " in result.out.splitlines()[0]
    assert "contain BPE marks" in command("score", "--hyp", texts[0], "--ref", texts[1]).err
    output = tmp_path / "generate.txt"
    rows = [f"T-{i}\t{s}\nH-{i}\t-0.5\t{s}\nD-{i}\t-0.5\t{s}\n" for i, s in enumerate(subwords)]
    output.write_text("".join(rows), encoding="utf-8")
    result = command("score", "--generate-output", output, "--ref", texts[1], "--remove-bpe")
    assert result.err == "" and result.out.count("  100.00  ") == 3
