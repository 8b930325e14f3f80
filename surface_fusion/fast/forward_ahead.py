"""The forward of a batch that was launched before the batch came, if everything is still as it was then."""

from collections.abc import Callable, Sequence
from typing import Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from surface_fusion.fast.flat import FlatParameters

Outcome = TypeVar("Outcome")


class Begun(NamedTuple, Generic[Outcome]):
    """A forward, and what it hangs on."""

    tokens: Sequence[Tensor]
    version: int
    """Of the parameters."""
    drawn: tuple[Tensor, Tensor]
    """States of the generator of random numbers, before it and after."""
    outcome: Outcome


class ForwardAhead(Generic[Outcome]):
    """Keeps one forward that was begun, until it is taken.

    Args:
        flat: the parameters.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._begun: Begun[Outcome] | None = None
        device = flat.data.device
        generators = torch.cuda.default_generators if device.type == "cuda" else [torch.default_generator]
        self._generator = generators[device.index or 0]

    def begin(self, tokens: Sequence[Tensor], seed: int, run: Callable[[], Outcome]) -> None:
        """Run the forward *run* of a batch of *tokens*, with the random numbers of *seed*.

        What else is drawn before the batch comes is as if it had not been run.
        """
        before = self._generator.get_state()
        self._generator.manual_seed(seed)
        fresh = self._generator.get_state()
        outcome = run()
        self._begun = Begun(tokens, self._flat.version(), (fresh, self._generator.get_state()), outcome)
        self._generator.set_state(before)

    def take(self, tokens: Sequence[Tensor]) -> Outcome | None:
        """What :meth:`begin` found for *tokens*, if that is what a run would find now; else None.

        The parameters must not have changed (by what torch counts, which changes of ``.data`` are not), and
        the generator must have been given the same seed, and nothing have been drawn from it since.
        """
        begun, self._begun = self._begun, None
        if (
            begun is None
            or any(one is not other for one, other in zip(begun.tokens, tokens, strict=True))
            or begun.version != self._flat.version()
            or not self._generator.get_state().equal(begun.drawn[0])
        ):
            return None
        self._generator.set_state(begun.drawn[1])
        return begun.outcome
