"""The losses of a padded batch, with output layer and loss in one operation."""

from typing import Any

from torch import Tensor

from surface_fusion.ops.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy


def fused_losses(
    decoder: Any, features: Tensor, sample: dict[str, Any], *, smoothing: float, ignore_prefix_size: int
) -> LinearCrossEntropy:
    """Compute losses summed over the non-padding target tokens.

    Args:
        decoder: a :class:`surface_fusion.models.decoder.SurfaceFusionDecoder`.
        features: its output with ``features_only``: B x T x C, or B x T x 2 x C.
        sample: a batch as fairseq collates it.
        smoothing: label smoothing epsilon.
        ignore_prefix_size: number of target tokens at the start of each sentence that do not count.
    """
    target = sample["target"]
    keep = target.ne(decoder.padding_idx)
    weight = keep.float()
    weight[:, :ignore_prefix_size] = 0
    # Real tokens first, in order: sample["ntokens"] is their number, so no synchronisation is needed.
    rows = keep.flatten().byte().argsort(descending=True, stable=True)[: sample["ntokens"]]
    features, target, weight = features.flatten(0, 1)[rows], target.flatten()[rows], weight.flatten()[rows]
    gate: Tensor | float | None = None
    if features.dim() == 3:
        gate = decoder.cfg.sf_gate
        if decoder.cfg.learned_gate:
            gate = decoder.gate(features[:, None]).flatten()
    return linear_cross_entropy(
        features,
        decoder.output_projection.weight,
        target,
        weight,
        smoothing=smoothing,
        gate=gate,
    )
