"""The kernel of the loss against plain torch: on a GPU, or in the interpreter."""

from typing import Any

import pytest
import torch
from torch import Tensor

from surface_fusion.ops import linear_cross_entropy as module
from surface_fusion.ops.linear_cross_entropy import (
    linear_cross_entropy,
    linear_cross_entropy_plain,
    softmax_rows_torch_,
)
from tests.helpers.interpreter import (
    DEVICE,
    assert_passes_in_the_interpreter,
    runs_here,
    starts_the_interpreter,
)

TOLERANCE = {torch.float32: 1e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}


@starts_the_interpreter
def test_in_the_interpreter(pytestconfig: pytest.Config) -> None:
    assert_passes_in_the_interpreter(pytestconfig, __file__)


def rows(
    logits: Tensor, target: Tensor, row_weight: Tensor, gate: Tensor | None, smoothing: float = 0.1
) -> dict[str, tuple[Tensor, Tensor]]:
    """Sums and gradients of n x B x V *logits*, by the kernel and by plain torch in float32."""
    from surface_fusion.ops.linear_cross_entropy_triton import softmax_rows_

    tokens, branches, vocab = logits.shape
    stride = -(-vocab // 64) * 64
    unit = torch.tensor(2.0 / 1024, device=DEVICE)
    out = {}
    for name, kernel in (("torch", softmax_rows_torch_), ("triton", softmax_rows_)):
        # Values after the vocabulary must not matter.
        buffer = torch.full(
            (tokens * branches, stride),
            float("nan"),
            dtype=logits.dtype if name == "triton" else torch.float32,
        ).to(DEVICE)
        chunk = buffer[:, :vocab].unflatten(0, (tokens, branches))
        chunk.copy_(logits)
        sums = torch.zeros(4, tokens + 1, device=DEVICE)[:, 1:]  # a chunk's columns of a longer matrix
        kernel(chunk, target, row_weight, gate, unit, smoothing, sums, True)
        out[name] = sums, chunk
    return out


@runs_here
@pytest.mark.parametrize("dtype", list(TOLERANCE))
@pytest.mark.parametrize("paired", [False, True])
@pytest.mark.parametrize("vocab", [2, 77, 4096, 9001])
def test_equals_torch(vocab: int, paired: bool, dtype: torch.dtype) -> None:
    from surface_fusion.ops.linear_cross_entropy_triton import softmax_rows_

    generator = torch.Generator().manual_seed(vocab)
    for size in (1e-3, 3.0, 1e4):
        logits = (size * torch.randn(4, 1 + paired, vocab, generator=generator)).to(DEVICE, dtype)
        target = torch.randint(vocab, (4,), generator=generator).to(DEVICE)
        row_weight = torch.tensor([1.0, 0.0, 2.0, 0.5], device=DEVICE)
        gate = torch.tensor([0.0, 0.3, 0.8, 1.0], device=DEVICE) if paired else None
        target[1] = -100  # of an ignored row
        # One gate per token, and one for all.
        for kind in [gate, gate[2:3].expand(4)] if gate is not None else [None]:
            got = rows(logits, target, row_weight, kind)
            (sums, gradient), (true_sums, true_gradient) = got["triton"], got["torch"]
            kept = slice(0, 4 if paired else 3)
            atol = 1e-6 * true_sums[kept].abs().max().item()
            torch.testing.assert_close(sums[kept], true_sums[kept], rtol=1e-6, atol=atol)
            # Accurate to the last bit of each entry, and to 1e-6 where softmax and q cancel.
            atol, rtol = 1024 * 1e-6, TOLERANCE[dtype]
            torch.testing.assert_close(gradient.float(), true_gradient, rtol=rtol, atol=atol)
            assert not sums[:, 1].any()
            assert not gradient[1].any()
    again = torch.zeros_like(sums)
    softmax_rows_(logits.clone(), target, row_weight, kind, row_weight[0], 0.1, again, False)
    assert torch.equal(again[kept], sums[kept])


@runs_here
def test_infinite_logits_and_unknown_targets_make_the_loss_nan_or_infinite() -> None:
    from surface_fusion.ops.linear_cross_entropy_triton import softmax_rows_

    for change in ("nan", "inf", "target"):
        logits, target = torch.zeros(2, 1, 70, device=DEVICE), torch.zeros(2, dtype=torch.long, device=DEVICE)
        if change == "target":
            target[0] = 70
        else:
            logits[0, 0, 5] = float(change)
        sums = torch.zeros(4, 2, device=DEVICE)
        one = torch.ones(2, device=DEVICE)
        softmax_rows_(logits, target, one, None, one[0], 0.1, sums, True)
        assert not sums[:3, 0].isfinite().any()
        assert sums[:3, 1].isfinite().all()


@runs_here
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("mode", ["single", "paired", "learned"])
def test_whole_operation_equals_the_oracle(
    mode: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Three chunks, loss scale 128, against the oracle in float32."""
    from surface_fusion.ops.linear_cross_entropy_triton import softmax_rows_

    monkeypatch.setattr(module, "_softmax_rows", lambda *_: softmax_rows_)
    monkeypatch.setattr(module, "_chunk_rows", lambda *_: 6)
    torch.manual_seed(0)
    features = torch.randn((7, 6) if mode == "single" else (7, 2, 6)).to(DEVICE, dtype)
    weight = torch.randn(131, 6).to(DEVICE, dtype)
    gate = {"single": None, "paired": 0.8, "learned": torch.rand(7).to(DEVICE, dtype)}[mode]
    target = torch.randint(131, (7, 2)).to(DEVICE)[:, 0]  # with gaps in memory, and so are the weights
    row_weight = (
        torch.tensor([1, 1, 0, 1, 0, 1, 1]).to(DEVICE, torch.float32).expand(2, 7).t().contiguous()[:, 0]
    )

    def gradients(operation: Any, dtype: torch.dtype) -> list[Tensor]:
        leaves = [x.to(dtype, copy=True).requires_grad_() for x in (features, weight)]
        g = gate
        if isinstance(gate, Tensor):
            g = gate.to(dtype, copy=True).requires_grad_()
            leaves.append(g)
        out = operation(*leaves[:2], target, row_weight, smoothing=0.1, gate=g)
        (128 * out.loss).backward()
        return [torch.stack(out).detach(), *(x.grad.float() for x in leaves)]

    tolerance = 1e-6 if dtype == torch.float32 else 2e-3
    for actual, true in zip(
        gradients(linear_cross_entropy, dtype),
        gradients(linear_cross_entropy_plain, torch.float32),
        strict=True,
    ):
        torch.testing.assert_close(actual, true, rtol=0, atol=tolerance * true.abs().max().item())
