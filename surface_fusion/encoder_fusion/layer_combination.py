"""Layer combination, the base of methods inside a stack: each layer reads a combination of earlier outputs.

With y_0 the stack's input and y_l the output of layer l, layer l + 1 reads ``x_{l+1} = combine(y_0 ...
y_l)`` instead of y_l, and the stack's result is ``combine(y_0 ... y_L)``. With
``--no-encoder-fusion-embedding`` only layer 1 reads y_0, the embedding layer. Encoder and decoder have a
combination each. Positions are combined separately, so incremental decoding needs no additional state.
Memory is linear in the number of layers: the outputs are kept, which backward needs anyway.
"""

from collections.abc import Iterator
from functools import partial
from typing import Any

from torch import Tensor, nn

from surface_fusion.encoder_fusion.base import FusionMethod


class Combination(FusionMethod):
    """Computes the input of a layer from all earlier outputs, by :meth:`keep` and :meth:`combine`.

    A subclass may define ``layer_shares()``, the weights of outputs (rows) in the inputs of layers (columns):
    (L + 1) x (L + 1).

    Args:
        layers: number L of the stack's layers.
        dim: width C.
        normalize_before: whether its layers are pre-norm.
        embedding: whether layers after the first read y_0, too.

    Attributes:
        sizes: number of outputs that layers 1 ... L and the stack's result combine.
    """

    place = "inside both stacks"

    def __init__(self, layers: int, dim: int, normalize_before: bool, embedding: bool) -> None:
        super().__init__()
        self.dim, self.layers, self.normalize_before = dim, layers, normalize_before
        self.sizes = [max(1, depth + embedding) for depth in range(layers + 1)]

    def forward(self, y: Tensor, kept: list[Tensor]) -> Tensor:
        """x_{l+1} from y_l (... x C) and what was *kept* of y_0 ... y_{l-1}, to which y_l is added."""
        depth = len(kept)
        kept.append(self.keep(y, depth))
        return self.combine(kept[-self.sizes[depth] :], depth)

    def keep(self, y: Tensor, depth: int) -> Tensor:
        """The tensor to keep of y_depth, ... x C."""
        return y

    def combine(self, kept: list[Tensor], depth: int) -> Tensor:
        """x_{l+1} for l = *depth* from what was kept of the outputs that it reads, ... x C each."""
        raise NotImplementedError


class CombinedLayers(nn.ModuleList):
    """The layers of a stack, each of which reads the *combination* of all earlier outputs.

    The combination is registered with the stack, not here, because modules in this list are named by number.
    """

    def __init__(self, layers: nn.ModuleList, combination: Combination) -> None:
        super().__init__(nn.ModuleList.__iter__(layers))
        # *layers* is iterated over: it may be a list that drops some of them.
        self._unregistered: list[Any] = [layers, combination]

    def __iter__(self) -> Iterator[Any]:
        layers, combination = self._unregistered
        # Neither train() nor a layer that is put into the place of another reaches it.
        layers.training, layers._modules = self.training, self._modules
        kept: list[Tensor] = []
        for depth, layer in enumerate(layers):
            yield partial(_run, layer, depth, kept, combination)


def _run(
    layer: Any, depth: int, kept: list[Tensor], combination: Combination, x: Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Run layer *depth* on the combination of *x* and earlier outputs; also combine the last result."""
    result = layer(combination(x, kept), *args, **kwargs)
    if depth + 1 < combination.layers:
        return result
    y, *rest = result if isinstance(result, tuple) else (result,)
    y = combination(y, kept)
    return (y, *rest) if isinstance(result, tuple) else y
