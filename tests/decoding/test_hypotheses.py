"""Hypotheses are read out of what a search leaves behind."""

import torch

from surface_fusion.decoding.hypotheses import History, hypotheses
from tests.helpers.tiny import EOS


def test_hypotheses_are_read_backwards() -> None:
    """One sentence, two lanes: lane 1 ends first; the other end of that step comes from lane 0."""
    lanes = torch.tensor([[[0, 0]], [[1, 0]], [[0, 0]]])
    tokens = torch.tensor([[[5, 6]], [[7, 8]], [[9, 9]]])
    totals = torch.tensor([[[-1.0, -2.0]], [[-3.0, -4.0]], [[-9.0, -9.0]]])
    ends = torch.tensor([[[False, False]], [[False, True]], [[True, True]]])
    end_lanes = torch.tensor([[[0, 0]], [[0, 1]], [[0, 1]]])
    end_totals = torch.tensor([[[0.0, 0.0]], [[0.0, -2.5]], [[-3.5, -4.5]]])
    attention = torch.arange(12.0).view(3, 1, 2, 2)  # 4 t + 2 lane + source
    found = hypotheses(History(lanes, tokens, totals, ends, end_lanes, end_totals, attention), EOS)
    assert found.sentence.tolist() == [0, 0]  # the third comes too late
    assert found.length.tolist() == [2, 3]
    assert found.tokens.tolist() == [[6, EOS, EOS], [6, 7, EOS]]
    assert found.totals[0, :2].tolist() == [-2.0, -2.5]
    assert found.totals[1].tolist() == [-2.0, -3.0, -3.5]
    assert found.attention[0, :2].tolist() == [[0, 1], [6, 7]]
    assert found.attention[1].tolist() == [[0, 1], [6, 7], [8, 9]]
