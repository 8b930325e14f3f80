"""The forward of a batch that was launched before the batch came, if everything is still as it was then."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from surface_fusion.fast.flat import FlatParameters

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

MISSES = 3
"""So many forwards in a row for nothing, and no other is begun: something changes what they hang on."""


@dataclass(frozen=True)
class Begun(Generic[Outcome]):
    """A forward, and what it hangs on."""

    tokens: Sequence[Tensor]
    versions: list[int]
    """Of the parameters, and of the tokens."""
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
        self._missed = 0
        device = flat.data.device
        generators = torch.cuda.default_generators if device.type == "cuda" else [torch.default_generator]
        self._generator = generators[device.index or 0]

    @property
    def pays(self) -> bool:
        """Whether forwards that were begun have been of use."""
        return self._missed < MISSES

    def begin(self, tokens: Sequence[Tensor], seed: int, run: Callable[[], Outcome]) -> None:
        """Run the forward *run* of a batch of *tokens*, with the random numbers of *seed*.

        What else is drawn before the batch comes is as if it had not been run.
        """
        self._missed += 1  # until it is taken
        self._begun = None
        before = self._generator.get_state()
        self._generator.manual_seed(seed)
        try:
            fresh = self._generator.get_state()
            outcome = run()
            self._begun = Begun(tokens, self._versions(tokens), (fresh, self._generator.get_state()), outcome)
        finally:
            self._generator.set_state(before)

    def take(self, tokens: Sequence[Tensor]) -> Outcome | None:
        """What :meth:`begin` found for *tokens*, if that is what a run would find now; else None.

        Parameters and tokens must not have changed (by what torch counts, which changes of ``.data`` are
        not), and the generator must have been given the same seed, and nothing have been drawn since.
        """
        begun, self._begun = self._begun, None
        if begun is None:
            return None
        if (
            any(one is not other for one, other in zip(begun.tokens, tokens, strict=True))
            or begun.versions != self._versions(tokens)
            or not self._generator.get_state().equal(begun.drawn[0])
        ):
            if not self.pays:
                logger.info("forwards are not begun early any more: parameters or batches change in between")
            return None
        self._missed = 0
        self._generator.set_state(begun.drawn[1])
        return begun.outcome

    def _versions(self, tokens: Sequence[Tensor]) -> list[int]:
        return [self._flat.version(), *(part._version for part in tokens)]
