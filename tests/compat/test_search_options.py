"""Options of beam search do what they say.

Also tests ``compat/eval_bleu.py``.
"""

import argparse
import itertools
from pathlib import Path

import pytest
import torch
from fairseq import metrics, search, utils
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks.translation import TranslationTask

from tests.helpers.tiny import SHARED, batch, build, shaken


def test_diverse_beam_takes_sentence_ids() -> None:
    """The ids of a batch decide nothing: rows 0, 1 and ids 70, 90 give the same candidates."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.rand(2, 2, 9, generator=generator).log_softmax(-1) for _ in range(3)]

    def candidates(ids: torch.Tensor) -> list[torch.Tensor]:
        searcher = search.DiverseBeamSearch(Dictionary(), num_groups=2, diversity_strength=0.5)
        out = list(searcher.step(0, steps[0], None, None, ids))
        scores = torch.zeros(2, 2, 1)
        out += searcher.step(1, steps[1], scores, None, ids)
        out += searcher.step(2, steps[2][1:], scores[1:].repeat(1, 1, 2), None, ids[1:])  # one has ended
        return out

    by_row, by_id = candidates(torch.tensor([0, 1])), candidates(torch.tensor([70, 90]))
    assert all(torch.equal(a, b) for a, b in zip(by_row, by_id, strict=True))


def test_no_ngram_comes_twice() -> None:
    """``--no-repeat-ngram-size 2``: a model that would say one word over and over."""
    model = shaken(SHARED)
    with torch.no_grad():
        model.decoder.output_projection.weight[9] *= 4
    dictionary = build(SHARED)[1].target_dictionary
    net = batch()["net_input"]

    def repeats(**options: int) -> int:
        """Sentences in which two words stand side by side more than once."""
        generator = SequenceGenerator([model], dictionary, beam_size=2, max_len_b=12, min_len=8, **options)
        found = generator.generate([], {"net_input": {k: net[k] for k in ("src_tokens", "src_lengths")}})
        words = [hypotheses[0]["tokens"].tolist() for hypotheses in found]
        pairs = [list(itertools.pairwise(sentence)) for sentence in words]
        return sum(len(set(each)) < len(each) for each in pairs)

    assert repeats() > 0 == repeats(no_repeat_ngram_size=2)


def test_replace_unk_without_an_alignment_dictionary(tmp_path: Path) -> None:
    assert utils.load_align_dict("@@ ") == {}
    assert utils.load_align_dict(None) is None
    (tmp_path / "align").write_text("horse cal\n")
    assert utils.load_align_dict(str(tmp_path / "align")) == {"horse": "cal"}


@pytest.mark.parametrize("batches", [(0,), (0, 4), (4, 0)], ids=str)
def test_bleu_counts_batches_of_empty_hypotheses(batches: tuple[int, ...]) -> None:
    """``--eval-bleu``: BLEU of the words found in all batches, whichever is first."""
    task = TranslationTask(argparse.Namespace(eval_bleu=True), Dictionary(), Dictionary())
    criterion = type("Criterion", (), {"reduce_metrics": staticmethod(lambda logging_outputs: None)})()
    with metrics.aggregate(new_root=True) as values:
        for length in batches:
            output = {"_bleu_sys_len": length, "_bleu_ref_len": 4, "ntokens": 5, "nsentences": 1}
            for name in ("counts", "totals"):
                output |= {f"_bleu_{name}_{i}": max(length - i, 0) for i in range(4)}
            task.reduce_metrics([output], criterion)
    # With a batch of 4 right words of 8, the brevity penalty exp(1 - 8 / 4) alone.
    assert values.get_smoothed_values()["bleu"] == (36.79 if any(batches) else 0)


def test_replace_unk_copies_the_aligned_word() -> None:
    """By a hard or a soft alignment of subwords; a word that is split is copied as a whole."""
    words = Dictionary()
    known = words.add_symbol("un")
    tokens, text = torch.tensor([known, words.unk(), words.unk(), words.eos()]), "a zeb@@ ra runs"
    soft = [["1", "0", "0", "0"], ["0", ".1", ".9", "0"], ["0", "0", "0", "1"]]
    for alignment in ([(0, 0), (2, 1), (3, 2)], soft):
        for align_dict, said in (({}, "un zebra runs"), ({"zebra": "zebru"}, "un zebru runs")):
            found = utils.post_process_prediction(tokens, text, alignment, align_dict, words, "@@ ")
            assert found[1] == said
    assert utils.post_process_prediction(tokens, text, [], {}, words)[1] == "un <unk> <unk>"
    assert utils.post_process_prediction(tokens, text, soft, None, words)[1] == "un <unk> <unk>"
