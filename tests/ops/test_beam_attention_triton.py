"""The kernel of attention with shared keys against torch's: on a GPU, or in the interpreter."""

import pytest
import torch
import torch.nn.functional as F

from surface_fusion.ops.backend import INTERPRETED
from surface_fusion.ops.beam_attention import beam_attention
from tests.helpers.interpreter import (
    DEVICE,
    assert_passes_in_the_interpreter,
    runs_here,
    starts_the_interpreter,
)

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.6e-2}


@starts_the_interpreter
def test_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    assert_passes_in_the_interpreter(pytestconfig, __file__)


@runs_here
@pytest.mark.parametrize("written", [None, 1, 6, 33])
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize(
    ("heads", "beam", "dim"), [(2, 4, 8), (3, 1, 20), (1, 5, 64), (1, 2, 128), (1, 17, 16)]
)
def test_equals_torch(heads: int, beam: int, dim: int, dtype: torch.dtype, written: int | None) -> None:
    """Masked keys, also a complete first block (sources are padded on the left), and unwritten NaN."""
    if INTERPRETED and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies no bfloat16")
    sentences, positions = 3, 33
    keys = positions * beam
    generator = torch.Generator().manual_seed(dim)
    drawn = torch.randn(2, sentences, heads, keys, dim, generator=generator)
    query = torch.randn(sentences, beam, heads, dim, generator=generator)
    seen = torch.rand(sentences, 1, beam if written else 1, keys, generator=generator) > 0.4
    if written is None:
        seen[1, ..., : keys // 2] = False
    seen[..., 0 if written else -1] = True
    query, drawn = query.to(DEVICE, dtype).transpose(1, 2), drawn.to(DEVICE, dtype)
    bias = torch.zeros(seen.shape, dtype=dtype).masked_fill_(~seen, -torch.inf).to(DEVICE)
    readable = keys if written is None else written * beam
    pair = [x[..., :readable, :].float() for x in drawn]
    mask = bias[..., :readable].float().expand(-1, heads, beam, -1)
    expected = F.scaled_dot_product_attention(query.float(), *pair, attn_mask=mask).transpose(1, 2).flatten(2)
    drawn[..., readable:, :] = torch.nan
    last = torch.tensor([2**20 if written is None else written - 1], device=DEVICE)
    got = beam_attention(query, *drawn, bias, last)
    assert got.dtype == dtype and got.shape == (sentences, beam, heads * dim)
    torch.testing.assert_close(got.float(), expected, rtol=0, atol=TOLERANCE[dtype])
