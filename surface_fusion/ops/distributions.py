"""Fuse two distributions over the target vocabulary into one.

With the target logits ``z = E h``, the surface logits ``s = E r`` (``r`` is read from the source embeddings),
the output embedding ``E`` and ``lsm`` the log-softmax:

=============  =========================================  ===========================
mode           published formula                          what is computed here
=============  =========================================  ===========================
hard           ``g lsm(z) + (1-g) lsm(s)``                the same; sums to less than 1
soft           ``lsm(z + lsm(tau s))``                    ``lsm(E (h + tau r))``
postnorm       ``lsm(lsm(tau s) + lsm(z))``               ``lsm(E (h + tau r))``
soft_5         ``lsm(z + lsm(s / 5))``                    ``lsm(E (h + r / 5))``
postnorm_5     ``lsm(lsm(s / 5) + lsm(z))``               ``lsm(E (h + r / 5))``
postnorm_v1    ``lsm(exp(lsm(tau s) + lsm(z)))``          the same; nearly uniform
hard, renorm.  (not published)                            ``lsm(E (g h + (1-g) r))``
=============  =========================================  ===========================

``lsm`` ignores a constant per row and ``E`` is linear, so the soft modes and renormalised hard need
one vocabulary projection, not two (SurfaceFusion: Liu et al., ICLR 2021, https://arxiv.org/abs/2012.14768).
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from surface_fusion.ops.precision import accumulation_dtype


@dataclass(frozen=True)
class Mode:
    """A published fusion mode; with ``tau`` None the factor is ``--sf-softmax-tau``."""

    formula: str
    gated: bool = False
    tau: float | None = None
    exponentiated: bool = False

    def scale(self, sf_softmax_tau: float) -> float:
        """The factor on the surface logits."""
        return sf_softmax_tau if self.tau is None else self.tau


MODES = {
    "hard": Mode("g log_softmax(z) + (1-g) log_softmax(s)", gated=True),
    "soft": Mode("log_softmax(z + tau s)"),
    "postnorm": Mode("equal to soft"),
    "soft_5": Mode("soft with tau = 1/5", tau=0.2),
    "postnorm_5": Mode("equal to soft_5", tau=0.2),
    "postnorm_v1": Mode("log_softmax(softmax(z) * softmax(tau s)), nearly uniform", exponentiated=True),
}


def log_softmax(logits: Tensor) -> Tensor:
    """Log-softmax over the last axis, in float32 at least."""
    return F.log_softmax(logits, dim=-1, dtype=accumulation_dtype(logits.dtype))


def hard_log_probs(logits: Tensor, gate: Tensor | float) -> Tensor:
    """``g lsm(z) + (1-g) lsm(s)``, mode hard; the probabilities sum to at most 1.

    *logits* are z and s, ``[..., 2, vocab]``; *gate* is g, a number or ``[..., 1]``.
    """
    tgt, src = log_softmax(logits).unbind(dim=-2)
    return torch.lerp(src, tgt, gate)


def exponentiated_log_probs(tgt_logits: Tensor, src_logits: Tensor) -> Tensor:
    """``lsm(exp(lsm(z) + lsm(s)))`` of ``[..., vocab]``, mode postnorm_v1; s is already scaled by tau."""
    return log_softmax((log_softmax(tgt_logits) + log_softmax(src_logits)).exp())
