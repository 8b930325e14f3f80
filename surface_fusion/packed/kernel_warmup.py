"""Compile the Triton kernels of a training step before the first update.

Triton compiles a kernel when it is first called with arguments of new types, which takes most of a second. It
stores the result on disk, so later trainings on the machine only load it.
"""

import logging
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import torch

from surface_fusion.ops.linear_cross_entropy import row_stride
from surface_fusion.ops.packed_rows import PackedRows

logger = logging.getLogger(__name__)

ROWS = 64

Call = Callable[[], Any]


def compile_kernels(model: Any, smoothing: float, dtype: torch.dtype, device: torch.device) -> None:
    """Call each kernel once. A failure is logged here, and raised when the training step needs the kernel.

    Args:
        model, smoothing, dtype, device: see :func:`kernel_calls`.
    """
    try:
        with torch.cuda.device(device if device.type == "cuda" else -1):
            calls = kernel_calls(model, smoothing, dtype, device)
            logger.info(f"compiling {len(calls)} GPU kernels: about {len(calls)} s, once per machine")
            for call in calls:
                call()
    except Exception as error:  # Triton raises many types
        logger.warning(f"compiling the GPU kernels failed: {error}")


def kernel_calls(model: Any, smoothing: float, dtype: torch.dtype, device: torch.device) -> list[Call]:
    """Calls of all kernels that a training step of *model* needs, on a few rows of zeros.

    Args:
        model: a model without distributed wrappers; its parameters may be on any device.
        smoothing: label smoothing epsilon.
        dtype, device: those of the training.
    """
    seed = torch.zeros(4, dtype=torch.int32, device=device)[0]
    return [
        *_attention_calls(model, dtype, seed),
        *_sublayer_calls(model, dtype, seed),
        _loss_call(model.decoder, smoothing, dtype, device),
    ]


def _attention_calls(model: Any, dtype: torch.dtype, seed: torch.Tensor) -> Iterator[Call]:
    """Forward and backward for each width of a head, with or without dropout."""
    from surface_fusion.ops.packed_attention_triton import attention_backward, attention_forward

    device = seed.device
    indices = torch.zeros(ROWS, dtype=torch.int64, device=device)
    rows = PackedRows(indices, indices, indices, torch.tensor([0, ROWS], device=device))
    first = model.decoder.layers[0]
    attentions = [model.encoder.layers[0].self_attn, first.self_attn, first.encoder_attn]
    if hasattr(model.decoder, "sf_attn"):
        attentions.append(model.decoder.sf_attn)
    for dim, dropout in {(a.q_proj.out_features // a.num_heads, a.dropout_module.p > 0) for a in attentions}:
        q, k, v, out, dq, dk, dv = torch.zeros(7, ROWS, 1, dim, dtype=dtype, device=device).unbind()
        lse = torch.zeros(1, ROWS, device=device)
        options = rows, rows, False, 0.5 if dropout else 0.0, seed
        yield partial(attention_forward, q, k, v, *options)
        yield partial(attention_backward, out, (q, k, v, out, lse), (dq, dk, dv), *options)


def _sublayer_calls(model: Any, dtype: torch.dtype, seed: torch.Tensor) -> Iterator[Call]:
    """Forward and backward of a sublayer's end, and ReLU's backward, for each shape of a layer."""
    from surface_fusion.ops.activation_triton import relu_backward
    from surface_fusion.ops.add_norm_triton import add_norm_backward, add_norm_forward

    zeros = partial(torch.zeros, dtype=dtype, device=seed.device)
    for dim, hidden, dropout, pre_norm in {
        (layer.fc2.out_features, layer.fc1.out_features, layer.dropout_module.p > 0, layer.normalize_before)
        for layer in (model.encoder.layers[0], model.decoder.layers[0])
    }:
        rate = 0.5 if dropout else 0.0
        x, residual = zeros(2, ROWS, dim).unbind()
        x_bias, weight, bias = zeros(3, dim).unbind()
        mean, rstd = torch.zeros(2, ROWS, device=seed.device).unbind()
        d_residual = x if pre_norm else None  # a post-norm layer does not read the sum before LayerNorm
        yield partial(add_norm_forward, x, x_bias, residual, weight, bias, rate, 1e-5, seed)
        yield partial(add_norm_backward, x, d_residual, (x, weight, mean, rstd), rate, seed)
        yield partial(relu_backward, zeros(ROWS, hidden), zeros(ROWS, hidden), 1.0)


def _loss_call(decoder: Any, smoothing: float, dtype: torch.dtype, device: torch.device) -> Call:
    """The loss and the gradient of the logits."""
    from surface_fusion.ops.linear_cross_entropy_triton import softmax_rows_

    cfg = decoder.cfg
    paired = cfg.surfacefusion is not None and decoder.paired
    float32 = partial(torch.zeros, dtype=torch.float32, device=device)
    vocab = decoder.output_projection.out_features
    branches = 2 if paired else 1
    buffer = torch.zeros(ROWS * branches, row_stride(vocab), dtype=dtype, device=device)
    logits = buffer[:, :vocab].unflatten(0, (ROWS, branches))
    gate = None
    if paired:
        gate = float32(ROWS) if cfg.learned_gate else float32(1).expand(ROWS)
    target = torch.zeros(ROWS, dtype=torch.int64, device=device)
    unit, sums = float32(1)[0], float32(4, ROWS)
    return partial(softmax_rows_, logits, target, float32(ROWS), gate, unit, smoothing, sums, True)
