"""Hypotheses are reconstructed from the back-pointers of a search."""

import torch

from surface_fusion.decoding.hypotheses import History, trace_back
from tests.helpers.tiny import EOS


def test_back_pointers_are_followed_from_the_end() -> None:
    """One sentence, two beams: beam 1 ends first; the other end of that step comes from beam 0."""
    history = History(
        back_pointers=torch.tensor([[[0, 0]], [[1, 0]], [[0, 0]]]),
        tokens=torch.tensor([[[5, 6]], [[7, 8]], [[9, 9]]]),
        scores=torch.tensor([[[-1.0, -2.0]], [[-3.0, -4.0]], [[-9.0, -9.0]]]),
        finished=torch.tensor([[[False, False]], [[False, True]], [[True, True]]]),
        finished_beams=torch.tensor([[[0, 0]], [[0, 1]], [[0, 1]]]),
        finished_scores=torch.tensor([[[0.0, 0.0]], [[0.0, -2.5]], [[-3.5, -4.5]]]),
        attention=torch.arange(12.0).view(3, 1, 2, 2),  # 4 t + 2 beam + source
    )
    hypotheses = trace_back(history, EOS)
    assert hypotheses.sentence.tolist() == [0, 0]  # the third ends too late
    assert hypotheses.length.tolist() == [2, 3]
    assert hypotheses.tokens.tolist() == [[6, EOS, EOS], [6, 7, EOS]]
    assert hypotheses.scores[0, :2].tolist() == [-2.0, -2.5]
    assert hypotheses.scores[1].tolist() == [-2.0, -3.0, -3.5]
    assert hypotheses.attention[0, :2].tolist() == [[0, 1], [6, 7]]
    assert hypotheses.attention[1].tolist() == [[0, 1], [6, 7], [8, 9]]
