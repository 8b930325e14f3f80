"""The result of a forward on packed rows: the losses, and a function that runs the backward."""

from collections.abc import Callable
from typing import Any, NamedTuple

from torch import Tensor

from surface_fusion.ops.linear_cross_entropy import LinearCrossEntropy


class ForwardResult(NamedTuple):
    """What a forward returns.

    Attributes:
        losses: the losses, detached.
        backward: adds the gradients of all parameters, times its argument (a scalar tensor), to the flat
            gradient; can be called once.
    """

    losses: LinearCrossEntropy
    backward: Callable[[Tensor], None]


def tokens_of(sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Source, shifted target and target of a batch: B x S, B x T, B x T."""
    inputs = sample["net_input"]
    return inputs["src_tokens"], inputs["prev_output_tokens"], sample["target"]
