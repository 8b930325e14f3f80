"""Half precision is cast to float32, and float64 is kept."""

import pytest
import torch

from surface_fusion.ops.precision import accumulation_dtype, at_least_float32


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_half_precision_is_cast_to_float32(dtype: torch.dtype) -> None:
    expected = torch.float64 if dtype == torch.float64 else torch.float32
    assert accumulation_dtype(dtype) == expected
    assert at_least_float32(torch.zeros(2, dtype=dtype)).dtype == expected
