"""Triton: compute the loss of logits and overwrite them with their gradient, in two passes over a row.

The losses, and ``w (softmax(z) - q)``, see ``linear_cross_entropy.py``; logits are n x 1 x V or n x 2 x V.
Tested against :func:`surface_fusion.ops.linear_cross_entropy.softmax_rows_torch_`.

One program per token. The first pass keeps a running maximum and sum of exponentials ("online softmax",
Milakov and Gimelshein 2018, https://arxiv.org/abs/1805.02867) and the sum of the logits, of one row, or of a
pair of rows and of their mixture. The second pass reads the row from the cache and overwrites it. Each thread
has its own running maximum, so threads synchronise once per row, not once per tile.
"""

import torch
import triton
import triton.language as tl
from torch import Tensor

LANES, WIDTH = 512, 8  # a tile: each lane reads 8 adjacent elements, 16 bytes of float16
NUM_WARPS = 8

LOG2E = tl.constexpr(1.4426950408889634)
LOWEST = tl.constexpr(-3.4028234663852886e38)  # finite: -inf minus -inf is NaN


@triton.jit
def _read(
    row: tl.tensor, cols: tl.tensor, limit: tl.tensor, VOCAB: tl.constexpr, EVICT: tl.constexpr
) -> tl.tensor:
    """A tile of logits, -inf after the vocabulary.

    The mask of the load ends at *limit*, the row's stride, a multiple of 64, so that loads are vectorised.
    *EVICT* tells the cache whether the row is read again (``evict_last``) or not (``evict_first``).
    """
    x = tl.load(row + cols, mask=cols < limit, other=0.0, eviction_policy=EVICT).to(tl.float32)
    return tl.where(cols < VOCAB, x, float("-inf"))


@triton.jit
def _online(x: tl.tensor, peak: tl.tensor, total: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """Update each lane's running maximum and sum of exp(x - maximum) by a tile."""
    new_peak = tl.maximum(peak, tl.max(x, axis=1))
    shrink = tl.exp2((peak - new_peak) * LOG2E)
    return new_peak, total * shrink + tl.sum(tl.exp2((x - new_peak[:, None]) * LOG2E), axis=1)


@triton.jit
def _across_lanes(peak: tl.tensor, total: tl.tensor) -> tuple[tl.tensor, tl.tensor]:
    """The row's maximum and sum of exp(x - maximum)."""
    row_peak = tl.max(peak, axis=0)
    return row_peak, tl.sum(total * tl.exp2((peak - row_peak) * LOG2E), axis=0)


@triton.jit
def _write_gradient(
    row: tl.tensor,
    cols: tl.tensor,
    limit: tl.tensor,
    y: tl.tensor,
    scale: tl.tensor,
    peak: tl.tensor,
    total: tl.tensor,
    on_target: tl.tensor,
    on_each: tl.tensor,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
) -> None:
    """Overwrite a tile with scale * (softmax - q)."""
    x = _read(row, cols, limit, VOCAB, "evict_first")
    q = scale * (on_each + tl.where(cols == y, on_target, 0.0))
    gradient = scale / total * tl.exp2((x - peak) * LOG2E) - q
    tl.store(row + cols, gradient.to(row.dtype.element_ty), mask=cols < STRIDE)


@triton.jit
def _softmax_kernel(
    logits: tl.tensor,
    target: tl.tensor,
    row_weight: tl.tensor,
    gate: tl.tensor,
    unit: tl.tensor,
    sums: tl.tensor,
    sums_stride: tl.tensor,
    gate_stride: tl.tensor,
    on_target: tl.tensor,
    on_each: tl.tensor,
    VOCAB: tl.constexpr,
    STRIDE: tl.constexpr,
    PAIRED: tl.constexpr,
    WITH_GRADIENT: tl.constexpr,
    LANES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    token = tl.program_id(0).to(tl.int64)
    weight = tl.load(row_weight + token)
    y = tl.load(target + token)
    real = weight != 0
    limit = tl.where(real, STRIDE, 0)  # an ignored row is not read
    tile = tl.arange(0, LANES)[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
    z_row = logits + token * STRIDE
    if PAIRED:
        z_row = logits + token * (2 * STRIDE)
    s_row = z_row + STRIDE

    # A target outside of the vocabulary makes the loss NaN. Read it before any thread writes.
    known = real & (y >= 0) & (y < VOCAB)
    z_y = tl.load(z_row + y, mask=known, other=float("nan")).to(tl.float32)
    z_peak = tl.full([LANES], LOWEST, tl.float32)
    z_total = tl.zeros([LANES], tl.float32)
    z_sum = tl.zeros([LANES], tl.float32)
    if PAIRED:
        g = tl.load(gate + token * gate_stride)
        s_y = tl.load(s_row + y, mask=known, other=float("nan")).to(tl.float32)
        s_peak, s_total, s_sum = z_peak, z_total, z_sum
        mix_peak, mix_total = z_peak, z_total
    for start in range(0, VOCAB, LANES * WIDTH):
        cols = start + tile
        z = _read(z_row, cols, limit, VOCAB, "evict_last")
        z_peak, z_total = _online(z, z_peak, z_total)
        z_sum += tl.sum(tl.where(cols < VOCAB, z, 0.0), axis=1)
        if PAIRED:
            s = _read(s_row, cols, limit, VOCAB, "evict_last")
            s_peak, s_total = _online(s, s_peak, s_total)
            s_sum += tl.sum(tl.where(cols < VOCAB, s, 0.0), axis=1)
            mix = tl.where(cols < VOCAB, g * z + (1 - g) * s, float("-inf"))
            mix_peak, mix_total = _online(mix, mix_peak, mix_total)

    peak, total = _across_lanes(z_peak, z_total)
    nll = tl.log(total) - (z_y - peak)
    off = on_target * (z_y - peak) + on_each * (tl.sum(z_sum, axis=0) - VOCAB * peak)
    loss = tl.log(total) - off
    normalized_nll = nll
    if PAIRED:
        peak_s, total_s = _across_lanes(s_peak, s_total)
        off_s = on_target * (s_y - peak_s) + on_each * (tl.sum(s_sum, axis=0) - VOCAB * peak_s)
        loss_s = tl.log(total_s) - off_s
        nll = g * nll + (1 - g) * (tl.log(total_s) - (s_y - peak_s))
        peak_mix, total_mix = _across_lanes(mix_peak, mix_total)
        normalized_nll = tl.log(total_mix) - (g * z_y + (1 - g) * s_y - peak_mix)
        tl.store(sums + 3 * sums_stride + token, tl.where(real, weight * (loss - loss_s), 0.0))
        loss = g * loss + (1 - g) * loss_s
    tl.store(sums + token, tl.where(real, weight * loss, 0.0))
    tl.store(sums + sums_stride + token, tl.where(real, weight * nll, 0.0))
    tl.store(sums + 2 * sums_stride + token, tl.where(real, weight * normalized_nll, 0.0))

    if WITH_GRADIENT:
        scale = weight / tl.load(unit)
        z_scale, s_scale = scale, scale
        if PAIRED:
            z_scale, s_scale = scale * g, scale * (1 - g)
        for start in range(0, VOCAB, LANES * WIDTH):
            cols = start + tile
            _write_gradient(z_row, cols, limit, y, z_scale, peak, total, on_target, on_each, VOCAB, STRIDE)
            if PAIRED:
                _write_gradient(
                    s_row, cols, limit, y, s_scale, peak_s, total_s, on_target, on_each, VOCAB, STRIDE
                )


def softmax_rows_(
    logits: Tensor,
    target: Tensor,
    row_weight: Tensor,
    gate: Tensor | None,
    unit: Tensor,
    smoothing: float,
    sums: Tensor,
    with_gradient: bool,
) -> None:
    """As :func:`~surface_fusion.ops.linear_cross_entropy.softmax_rows_torch_`, in one kernel.

    Also overwrites the elements between the end of the vocabulary and the row's stride. Triton compiles the
    kernel for each vocabulary size and dtype, with and without pairs and gradient.
    """
    tokens, branches, vocab = logits.shape
    on_each = smoothing / (vocab - 1)
    with torch.cuda.device_of(logits):
        _softmax_kernel[(tokens,)](
            logits,
            target,
            row_weight,
            row_weight if gate is None else gate,
            unit,
            sums,
            sums.stride(0),
            0 if gate is None else gate.stride(0),
            1.0 - smoothing - on_each,
            on_each,
            VOCAB=vocab,
            STRIDE=logits.stride(0) // branches,
            PAIRED=branches == 2,
            WITH_GRADIENT=with_gradient,
            LANES=LANES,
            WIDTH=WIDTH,
            num_warps=NUM_WARPS,
        )
