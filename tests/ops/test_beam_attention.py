"""Attention of the beams of a sentence on a CPU against the formula in a loop over sentences."""

import pytest
import torch

from surface_fusion.ops.beam_attention import beam_attention


@pytest.mark.parametrize("sentences", [1, 3])
@pytest.mark.parametrize("own", [True, False], ids=["a bias for each beam", "one for all"])
def test_equals_the_formula(sentences: int, own: bool) -> None:
    heads, beam, keys, dim = 2, 4, 12, 5
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(sentences, heads, beam, dim, generator=generator, dtype=torch.float64)
    key, value = torch.randn(2, sentences, heads, keys, dim, generator=generator, dtype=torch.float64)
    bias = torch.zeros(sentences, 1, beam if own else 1, keys, dtype=torch.float64)
    bias[torch.rand(bias.shape, generator=generator) < 0.4] = -torch.inf
    bias[..., 0] = 0
    got = beam_attention(query, key, value, bias, torch.tensor([keys // beam - 1]))
    assert got.shape == (sentences, beam, heads * dim)
    for i in range(sentences):
        for head in range(heads):
            scores = query[i, head] @ key[i, head].t() / dim**0.5 + bias[i, 0]
            expected = scores.softmax(-1) @ value[i, head]
            torch.testing.assert_close(got[i, :, head * dim : (head + 1) * dim], expected)
