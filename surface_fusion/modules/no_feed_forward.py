"""Layers without feed-forward sublayer and its LayerNorm (``--no-encoder-fnn``, ``--no-decoder-fnn``)."""

from typing import Any

from torch import Tensor, nn


class Zero(nn.Module):
    """Replaces a linear map; adds zero to the residual stream."""

    def forward(self, x: Tensor) -> Tensor:
        """Return a scalar zero."""
        return x.new_zeros(())


def without_feed_forward(layer: Any) -> Any:
    """Remove the feed-forward sublayer from *layer*, a fairseq layer that may be wrapped, and return it."""
    bare = getattr(layer, "module", layer)
    bare.fc1, bare.fc2, bare.final_layer_norm = Zero(), Zero(), nn.Identity()
    return layer
