"""Mark the parameters that ``FlatParameters`` must store next to each other, so that products are joined.

This applies to ``[q; k; v]`` of a self-attention and to ``[k; v]`` of all decoder layers' attentions to the
encoder, which have the same input. Names and shapes in checkpoints do not change.
"""

from typing import Any

from surface_fusion.modules.stacks import layers_of


def group_parameters(model: Any) -> None:
    """Mark the parameters of *model* for :class:`surface_fusion.packed.flat_parameters.FlatParameters`."""
    for name, stack in (("encoder", model.encoder), ("decoder", model.decoder)):
        for i, layer in enumerate(layers_of(stack)):
            _mark(f"{name}.layers.{i}.self_attn", self_projections(layer))
    for memory, projections in memory_projections(model.decoder).items():
        _mark(f"decoder.memory.{memory}", projections)


def self_projections(layer: Any) -> list[Any]:
    """q, k and v of a layer's self-attention."""
    attention = layer.self_attn
    return [attention.q_proj, attention.k_proj, attention.v_proj]


def memory_projections(decoder: Any) -> dict[int, list[Any]]:
    """k and v of the decoder's cross-attentions, by the encoder layer that they attend to.

    The key is -1, the encoder's output, for all layers; with layer-wise attention each layer has its own.
    """
    projections: dict[int, list[Any]] = {}
    for layer in layers_of(decoder):
        attention = getattr(layer, "encoder_attn", None)
        if attention is not None:
            memory = getattr(layer, "memory_index", -1)
            projections.setdefault(memory, []).extend([attention.k_proj, attention.v_proj])
    return projections


def _mark(name: str, projections: list[Any]) -> None:
    for kind in ("weight", "bias"):
        for rank, projection in enumerate(projections):
            parameter = getattr(projection, kind, None)
            if parameter is not None:
                parameter.flat_group = (f"{name}.{kind}", rank)
