"""Keep the result of a forward that was launched ahead, and use it if nothing has changed since."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from surface_fusion.packed.flat_parameters import FlatParameters

logger = logging.getLogger(__name__)

Outcome = TypeVar("Outcome")

MISSES = 3
"""After this many unused forwards in a row, stop launching ahead: something changes their inputs."""


@dataclass(frozen=True)
class Begun(Generic[Outcome]):
    """A forward that was launched ahead, and the state that it depends on."""

    tokens: Sequence[Tensor]
    versions: list[int]
    """Versions of the parameters and of the tokens."""
    drawn: tuple[Tensor, Tensor]
    """States of the generator of random numbers, before it and after."""
    outcome: Outcome


class ForwardAhead(Generic[Outcome]):
    """Stores one forward that was launched ahead until it is taken.

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
        """Run the forward *run* of a batch of *tokens* with the random seed *seed*.

        Restores the random number generator, so other draws are not affected.
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
        """Return the result of :meth:`begin` for *tokens* if it is still valid, else None.

        It is valid if parameters and tokens have not changed (by torch's version counters, which miss changes
        through ``.data``), and the generator was seeded with the same seed and not used since.
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
                logger.info(
                    "forwards are no longer launched ahead: parameters or batches change between updates"
                )
            return None
        self._missed = 0
        self._generator.set_state(begun.drawn[1])
        return begun.outcome

    def _versions(self, tokens: Sequence[Tensor]) -> list[int]:
        return [self._flat.version(), *(part._version for part in tokens)]
