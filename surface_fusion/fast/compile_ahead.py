"""Compile the kernels of a training step side by side, before the first step needs one after another.

A kernel takes Triton about a second, and a step has a dozen.
"""

import logging
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from surface_fusion.fast.linear_cross_entropy import linear_cross_entropy
from surface_fusion.fast.packed import PackedRows
from surface_fusion.fast.triton_installed import INTERPRETED

logger = logging.getLogger(__name__)

ROWS = 64


def compile_ahead(model: Any, smoothing: float) -> None:
    """Call each kernel that a step of *model* needs, on a few rows, in a thread each."""
    from surface_fusion.fast.attention_kernels import attention_backward, attention_forward
    from surface_fusion.fast.elementwise_kernels import add_norm_backward, add_norm_forward, relu_backward

    encoder, decoder, cfg = model.encoder, model.decoder, model.decoder.cfg
    data = decoder.output_projection.weight.detach()
    paired = cfg.surfacefusion is not None and decoder.paired
    zeros = partial(torch.zeros, dtype=data.dtype, device=data.device)
    float32 = partial(torch.zeros, dtype=torch.float32, device=data.device)
    integers = partial(torch.zeros, dtype=torch.int64, device=data.device)
    seed = torch.zeros(4, dtype=torch.int32, device=data.device)[0]
    starts = torch.tensor([0, ROWS], device=data.device)
    rows = PackedRows(integers(ROWS), integers(ROWS), integers(ROWS), starts)
    jobs: list[Callable[[], Any]] = []

    attentions = [encoder.layers[0].self_attn, decoder.layers[0].self_attn, decoder.layers[0].encoder_attn]
    if hasattr(decoder, "sf_attn"):
        attentions.append(decoder.sf_attn)
    for dim, dropped in {(a.q_proj.out_features // a.num_heads, a.dropout_module.p > 0) for a in attentions}:
        q, k, v, out, dq, dk, dv = zeros(7, ROWS, 1, dim).unbind()
        how = rows, rows, False, 0.5 if dropped else 0.0, seed
        saved = q, k, v, out, float32(1, ROWS)
        jobs.append(partial(attention_forward, q, k, v, *how))
        jobs.append(partial(attention_backward, out, saved, (dq, dk, dv), *how))

    for layer in (encoder.layers[0], decoder.layers[0]):
        rate = 0.5 if layer.dropout_module.p > 0 else 0.0
        dim, hidden = layer.fc2.out_features, layer.fc1.out_features
        x, residual = zeros(2, ROWS, dim).unbind()
        vectors = zeros(3, dim).unbind()
        jobs.append(
            partial(add_norm_forward, x, vectors[0], residual, vectors[1], vectors[2], rate, 1e-5, seed)
        )
        stream = x if layer.normalize_before else None  # of the residual, see PackedTransformer
        normed = x, vectors[0], float32(ROWS), float32(ROWS)
        jobs.append(partial(add_norm_backward, x, stream, normed, rate, seed))
        jobs.append(partial(relu_backward, zeros(ROWS, hidden), zeros(ROWS, hidden), 1.0))

    def loss() -> Tensor:
        weight = torch.empty_like(data).requires_grad_()
        features = zeros(ROWS, 2, data.shape[1]) if paired else zeros(ROWS, data.shape[1])
        gate: Tensor | float | None = 0.5 if paired else None
        if paired and cfg.learned_gate:
            gate = float32(ROWS)
        with torch.enable_grad():
            return linear_cross_entropy(
                features, weight, integers(ROWS), float32(ROWS), smoothing=smoothing, gate=gate
            ).loss

    def run(job: Callable[[], Any]) -> None:
        with torch.cuda.device(data.device), torch.no_grad():
            job()

    # Triton's interpreter, for tests, knows one thread only.
    with ThreadPoolExecutor(1 if INTERPRETED else len(jobs) + 1) as pool:
        list(pool.map(run, [loss, *jobs]))


class Compilation:
    """:func:`compile_ahead` while the process does something else.

    A failure is logged: whoever needs the kernel will meet it again.
    """

    def __init__(self, model: Any, smoothing: float) -> None:
        self._thread = threading.Thread(target=self._compile, args=(model, smoothing), daemon=True)
        self._thread.start()

    def _compile(self, model: Any, smoothing: float) -> None:
        try:
            compile_ahead(model, smoothing)
        except Exception as error:  # Triton's are of any kind
            logger.warning(f"compiling kernels ahead failed: {error}")

    def wait(self) -> None:
        """Until it is done."""
        self._thread.join()
