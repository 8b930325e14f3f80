"""Output layer and label-smoothed cross entropy as one operation.

For token n with weight w_n (0: padding), target y, logits z = E x_n and smoothing eps, with
``q = (1 - eps - eps_i) onehot(y) + eps_i`` and ``eps_i = eps / (V - 1)`` (fairseq's, sums to 1):

    ce(z) = -sum_v q_v lsm(z)_v = lse(z) - sum_v q_v z_v        d ce / d z = softmax(z) - q

with lse the log-sum-exp and lsm the log-softmax; the loss of a batch is

=======  =============  =============================================================
         features       loss
=======  =============  =============================================================
single   N x C          sum_n w_n ce(E x_n)
paired   N x 2 x C      sum_n w_n (g ce(E h_n) + (1-g) ce(E r_n)), published hard fusion
=======  =============  =============================================================

Logits are computed for one chunk of rows at a time. A kernel overwrites them with their gradient G, and both
products of the backward pass, G E and G^T X, are computed at once: three GEMMs and one kernel per chunk.
``backward`` only multiplies by the incoming gradient, which includes the loss scale.

float16: G is computed without the loss scale, so it is stored in units of ``max |w| / 1024``, in which 1e-6,
the size of a smoothing term, keeps full precision. The products are accumulated in float32; the incoming
gradient and the unit are applied there, before the cast to float16.
"""

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from surface_fusion.ops.backend import use_kernels
from surface_fusion.ops.distributions import log_softmax
from surface_fusion.ops.precision import accumulation_dtype, at_least_float32

CHUNK_BYTES = {"cuda": 576 * 2**20, "cpu": 16 * 2**20}
"""Size of the logits of one chunk. On a GPU 4096 or 8192 rows fill the 132 multiprocessors of an H100; on a
CPU the chunk should fit into the caches, but smaller products are slower."""

GRADIENT_RANGE = 1024.0
"""The largest gradient of a logit, in units; float16 then resolves 6e-8 units."""


class LinearCrossEntropy(NamedTuple):
    """Sums over the tokens, each weighted by ``row_weight``; 0-dim, float32 (or float64)."""

    loss: Tensor  # label-smoothed; carries the gradient
    nll: Tensor  # of the published, unnormalised distribution
    normalized_nll: Tensor  # of log_softmax(g z + (1-g) s); single: equal to nll


def linear_cross_entropy(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    row_weight: Tensor,
    *,
    smoothing: float,
    gate: Tensor | float | None = None,
) -> LinearCrossEntropy:
    """Compute the label-smoothed cross entropy of the logits ``features @ weight.T``.

    The loss is differentiable in *features*, *weight* and *gate*; under ``torch.no_grad`` no gradient is
    computed. The function does not synchronise.

    Args:
        features: N x C, or N x 2 x C: the pair (h, r) of hard fusion.
        weight: output embedding E, V x C, of the features' dtype (or under autocast of any).
        target: N, ids below V (any id where the weight is 0).
        row_weight: N, of any dtype; rows of weight 0 are ignored.
        smoothing: fairseq's ``--label-smoothing``.
        gate: weight g of the first branch, a number or N; required for pairs, not allowed otherwise.

    Raises:
        ValueError: the shapes do not fit together.
    """
    if (features.dim(), gate is None) not in ((2, True), (3, False)):
        raise ValueError(
            f"features {tuple(features.shape)} with gate {gate}: pass a gate with N x 2 x C, none with N x C"
        )
    if len(target) == 0:
        return linear_cross_entropy_plain(
            features, weight, target, row_weight, smoothing=smoothing, gate=gate
        )
    x = features if features.dim() == 3 else features.unsqueeze(1)
    loss, nlls = _Chunked.apply(x, weight, target, row_weight, gate, smoothing, torch.is_grad_enabled())
    return LinearCrossEntropy(loss, nlls[0], nlls[1])


def linear_cross_entropy_plain(
    features: Tensor,
    weight: Tensor,
    target: Tensor,
    row_weight: Tensor,
    *,
    smoothing: float,
    gate: Tensor | float | None = None,
) -> LinearCrossEntropy:
    """Compute the formula with all N x V log-probabilities in float32.

    It is the oracle of the tests, and used for a batch without tokens.
    """
    lprobs = log_softmax(F.linear(features, weight))
    if gate is not None:
        g = at_least_float32(gate).unsqueeze(-1) if isinstance(gate, Tensor) else gate
        lprobs = g * lprobs[:, 0] + (1 - g) * lprobs[:, 1]
    y = target.where(row_weight != 0, 0).unsqueeze(-1)
    w = row_weight.to(lprobs.dtype)
    eps_i = smoothing / (weight.shape[0] - 1)
    nll = -lprobs.gather(-1, y).squeeze(-1)
    loss = (1 - smoothing - eps_i) * nll - eps_i * lprobs.sum(-1)
    with torch.no_grad():
        normalized_nll = -log_softmax(lprobs).gather(-1, y).squeeze(-1)
    return LinearCrossEntropy((w * loss).sum(), (w * nll.detach()).sum(), (w * normalized_nll).sum())


def softmax_rows_torch_(
    logits: Tensor,
    target: Tensor,
    row_weight: Tensor,
    gate: Tensor | None,
    unit: Tensor,
    smoothing: float,
    sums: Tensor,
    with_gradient: bool,
) -> None:
    """Write the losses of a chunk to *sums*, and overwrite *logits* with their gradient.

    Args:
        logits: n x 1 x V or n x 2 x V; overwritten, by ``w share (softmax - q) / unit`` if *with_gradient*,
            where share is g and 1-g in a pair.
        target: n, contiguous.
        row_weight: n, contiguous, of the dtype of *sums*.
        gate: n, of the dtype of *sums*, for a pair.
        unit: size of the unit in which the gradient is stored, 0-dim, of the dtype of *sums*.
        smoothing: fairseq's ``--label-smoothing``.
        sums: 4 x n, float32 or float64: weighted loss, nll, normalised nll, gradient of the gate.
        with_gradient: whether to compute the gradient.
    """
    x = at_least_float32(logits)
    eps_i = smoothing / (x.shape[-1] - 1)
    confidence = 1 - smoothing - eps_i
    y = target.where(row_weight != 0, 0)[:, None, None].expand(*x.shape[:2], 1)
    share = row_weight[:, None]
    if gate is not None:
        mix = torch.lerp(x[:, 1], x[:, 0], gate[:, None])
        mix_nll = torch.logsumexp(mix, -1) - mix.gather(-1, y[:, 0]).squeeze(-1)
        share = share * torch.stack([gate, 1 - gate], dim=1)

    x.sub_(x.amax(-1, keepdim=True))
    at_target = x.gather(-1, y).squeeze(-1)
    all_logits = x.sum(-1)
    total = x.exp_().sum(-1)
    nll = total.log() - at_target
    ce = total.log() - confidence * at_target - eps_i * all_logits
    sums[0] = (share * ce).sum(-1)
    sums[1] = (share * nll).sum(-1)
    sums[2] = sums[1] if gate is None else row_weight * mix_nll
    if gate is not None:
        sums[3] = row_weight * (ce[:, 0] - ce[:, 1])

    if with_gradient:
        scale = (share / unit).unsqueeze(-1)
        x.mul_(scale / total.unsqueeze(-1)).sub_(eps_i * scale)
        x.scatter_add_(-1, y, -confidence * scale)
        if x is not logits:
            logits.copy_(x)


def _softmax_rows(x: Tensor) -> Callable[..., None]:
    """Return the implementation for *x*."""
    if x.is_cuda and use_kernels(x):
        from surface_fusion.ops.linear_cross_entropy_triton import softmax_rows_

        return softmax_rows_
    return softmax_rows_torch_


@cache
def _mixed_addmm(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether a product of *dtype* can be added to a float32 matrix (on CUDA, with torch newer than 2.8)."""
    matrix, total = torch.zeros(8, 8, dtype=dtype, device=device), torch.zeros(8, 8, device=device)
    try:
        torch.addmm(total, matrix, matrix, out_dtype=torch.float32, out=total)
    except (RuntimeError, TypeError):
        return False
    return True


def _add_product(out: Tensor, a: Tensor, b: Tensor, beta: int) -> None:
    """``out = beta out + a @ b``, summed in the dtype of *out*."""
    if a.dtype != out.dtype and _mixed_addmm(a.device, a.dtype):
        torch.addmm(out, a, b, out_dtype=out.dtype, beta=beta, out=out)
    else:
        out.addmm_(a.to(out.dtype), b.to(out.dtype), beta=beta)


def _scaled(gradient: Tensor | None, scale: Tensor, dtype: torch.dtype) -> Tensor | None:
    """Multiply *gradient* by *scale* in its own dtype and cast to *dtype*, in one pass."""
    if gradient is None:
        return None
    return torch.mul(gradient, scale, out=torch.empty_like(gradient, dtype=dtype))


def _chunk_rows(row_bytes: int, device_type: str) -> int:
    rows = max(CHUNK_BYTES.get(device_type, CHUNK_BYTES["cuda"]) // row_bytes, 64)
    return 1 << (rows.bit_length() - 1)


class _Chunked(torch.autograd.Function):
    """:func:`linear_cross_entropy` of N x 1 x C or N x 2 x C; returns the loss and both nll."""

    @staticmethod
    def forward(
        ctx: Any,
        features: Tensor,
        weight: Tensor,
        target: Tensor,
        row_weight: Tensor,
        gate: Tensor | float | None,
        smoothing: float,
        grad_enabled: bool,
    ) -> tuple[Tensor, Tensor]:
        ctx.dtypes = features.dtype, weight.dtype, gate.dtype if isinstance(gate, Tensor) else None
        device_type = features.device.type
        autocast = torch.is_autocast_enabled(device_type)
        dtype = torch.get_autocast_dtype(device_type) if autocast else features.dtype
        exact = accumulation_dtype(dtype)
        x, matrix = features.to(dtype).contiguous(), weight.to(dtype)
        row_weight = row_weight.to(exact).contiguous()
        unit = torch.linalg.vector_norm(row_weight, float("inf")).clamp_min(1e-30) / GRADIENT_RANGE
        if isinstance(gate, float | int):
            gate = torch.full((1,), gate, dtype=exact, device=features.device).expand(len(features))
        elif gate is not None:
            gate = gate.to(exact)

        needs_x, needs_matrix, _, _, needs_gate = (grad_enabled and n for n in ctx.needs_input_grad[:5])
        d_x = torch.empty_like(x, dtype=exact) if needs_x else None
        d_matrix = torch.empty_like(matrix, dtype=exact) if needs_matrix else None
        tokens = target.contiguous(), row_weight, gate
        sums = _compute_chunks(x, matrix, tokens, unit, smoothing, d_x, d_matrix)
        loss, nlls = sums[0].sum(), sums[1:3].sum(dim=1)
        ctx.mark_non_differentiable(nlls)
        ctx.save_for_backward(unit, d_x, d_matrix, sums[3] if needs_gate else None)
        return loss, nlls

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_loss: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
        unit, d_x, d_matrix, d_gate = ctx.saved_tensors
        features_dtype, weight_dtype, gate_dtype = ctx.dtypes
        scale = grad_loss * unit
        d_x, d_matrix = _scaled(d_x, scale, features_dtype), _scaled(d_matrix, scale, weight_dtype)
        return d_x, d_matrix, None, None, _scaled(d_gate, grad_loss, gate_dtype), None, None


def _compute_chunks(
    x: Tensor,
    matrix: Tensor,
    tokens: tuple[Tensor, Tensor, Tensor | None],
    unit: Tensor,
    smoothing: float,
    d_x: Tensor | None,
    d_matrix: Tensor | None,
) -> Tensor:
    """Return the sums of :func:`softmax_rows_torch_` for all tokens, 4 x N; write the gradients.

    Args:
        x: features, contiguous, N x 1 x C or N x 2 x C.
        matrix: V x C, of the same dtype.
        tokens: target, row weight and gate, N each.
        d_x, d_matrix: gradients of *x* and *matrix* to write, in units.
    """
    target, row_weight, gate = tokens
    (n, branches, _), vocab = x.shape, len(matrix)
    sums = torch.empty(4, n, dtype=row_weight.dtype, device=x.device)
    stride = -(-vocab // 64) * 64  # of the rows of logits; loads are vectorised at a multiple of 64
    step = min(max(_chunk_rows(stride * x.dtype.itemsize, x.device.type) // branches, 1), n)
    buffer = torch.empty(step * branches, stride, dtype=x.dtype, device=x.device)
    softmax_rows_ = _softmax_rows(x)
    for start in range(0, n, step):
        chunk = slice(start, min(start + step, n))
        rows = x[chunk].flatten(0, 1)
        logits = buffer[: len(rows), :vocab]
        torch.mm(rows, matrix.t(), out=logits)
        softmax_rows_(
            logits.unflatten(0, (-1, branches)),
            target[chunk],
            row_weight[chunk],
            gate[chunk] if gate is not None else None,
            unit,
            smoothing,
            sums[:, chunk],
            d_x is not None or d_matrix is not None,
        )
        if d_x is not None:
            _add_product(d_x[chunk].flatten(0, 1), logits, matrix, beta=0)
        if d_matrix is not None:
            _add_product(d_matrix, logits.t(), rows, beta=int(start > 0))
    return sums
