"""Options of beam search do what they say."""

import itertools
from pathlib import Path

import torch
from fairseq import search, utils
from fairseq.data import Dictionary
from fairseq.sequence_generator import SequenceGenerator

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
