"""``--encoder-layers-to-keep``, ``--decoder-layers-to-keep``: load a LayerDrop model with fewer layers.

fairseq drops the other layers' parameters when it loads a checkpoint (Fan et al., 2019,
https://arxiv.org/abs/1909.11556); this module adapts the configuration.
"""

from typing import Any

from surface_fusion.encoder_fusion import methods
from surface_fusion.errors import SurfaceFusionError


def normalise_layers_to_keep(args: Any) -> None:
    """Set the depths in *args* from the layers to keep, in place; idempotent.

    ``sf_idx`` is renumbered to the last kept layer that is not above it.

    Raises:
        SurfaceFusionError: a layer to keep does not exist, or a layer that another flag needs is not kept.
    """
    stacks = ("encoder", "decoder")
    keeps: dict[str, Any] = {stack: getattr(args, f"{stack}_layers_to_keep", None) for stack in stacks}
    if not any(keeps.values()):
        return
    method = methods().get(getattr(args, "encoder_fusion", None) or "")
    if method is not None and not method.any_depth:
        raise SurfaceFusionError(
            f"--encoder-fusion {args.encoder_fusion} has parameters for each layer, so no layer can be "
            "removed; leave out --encoder-layers-to-keep and --decoder-layers-to-keep"
        )
    for stack, keep in keeps.items():
        layers = getattr(args, f"{stack}_layers")
        keep = keep or range(layers)  # fairseq would drop all layers of a stack without the flag
        keep = keeps[stack] = sorted({int(i) for i in (keep.split(",") if isinstance(keep, str) else keep)})
        setattr(args, f"{stack}_layers_to_keep", ",".join(map(str, keep)))  # fairseq splits a string
        if len(keep) == layers:
            continue  # all layers, or adapted by an earlier call
        if keep[0] < 0 or keep[-1] >= layers:
            raise SurfaceFusionError(
                f"--{stack}-layers-to-keep {keep} names a layer that does not exist; "
                f"choose from 0 to {layers - 1}"
            )
        setattr(args, f"{stack}_layers", len(keep))
        if stack == "decoder" and args.sf_idx in range(-layers, layers):
            idx = range(layers)[args.sf_idx]
            if keep[0] > idx:
                raise SurfaceFusionError(
                    f"--decoder-layers-to-keep {keep} keeps no layer up to --sf-idx {idx}, whose output is "
                    "the query of the surface attention; keep one"
                )
            args.sf_idx = sum(i <= idx for i in keep) - 1
    if args.layer_wise_attention and keeps["encoder"][: len(keeps["decoder"])] != keeps["decoder"]:
        raise SurfaceFusionError(
            f"--layer-wise-attention pairs the layers, but --encoder-layers-to-keep {keeps['encoder']} and "
            f"--decoder-layers-to-keep {keeps['decoder']} differ; keep the same layers in both"
        )
