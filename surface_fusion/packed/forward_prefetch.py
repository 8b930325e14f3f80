"""Launch a forward before its batch is due, and use the result if nothing has changed since."""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch
from torch import Tensor

from surface_fusion.packed.flat_parameters import FlatParameters

logger = logging.getLogger(__name__)

Result = TypeVar("Result")

MISSES = 3
"""After this many unused forwards in a row, stop prefetching: something changes their inputs."""


@dataclass(frozen=True)
class _Prefetched(Generic[Result]):
    """The result of a forward, and what it depends on: version counters and random generator states."""

    tokens: Sequence[Tensor]
    versions: list[int]
    generator_before: Tensor
    generator_after: Tensor
    result: Result


class ForwardPrefetch(Generic[Result]):
    """Stores the result of one forward until it is taken.

    Args:
        flat: the parameters.
    """

    def __init__(self, flat: FlatParameters) -> None:
        self._flat = flat
        self._prefetched: _Prefetched[Result] | None = None
        self._missed = 0
        device = flat.data.device
        generators = torch.cuda.default_generators if device.type == "cuda" else [torch.default_generator]
        self._generator = generators[device.index or 0]

    @property
    def useful(self) -> bool:
        """Whether one of the last results was taken."""
        return self._missed < MISSES

    def launch(self, tokens: Sequence[Tensor], seed: int, run: Callable[[], Result]) -> None:
        """Run the forward *run* of a batch of *tokens* with the random seed *seed*.

        Restores the random number generator, so other draws are not affected.
        """
        self._missed += 1  # until it is taken
        self._prefetched = None
        before = self._generator.get_state()
        self._generator.manual_seed(seed)
        try:
            seeded = self._generator.get_state()
            result = run()
            after = self._generator.get_state()
            self._prefetched = _Prefetched(tokens, self._versions(tokens), seeded, after, result)
        finally:
            self._generator.set_state(before)

    def take(self, tokens: Sequence[Tensor]) -> Result | None:
        """Return the result of :meth:`launch` for *tokens* if it is still valid, else None.

        It is valid if parameters and tokens have not changed (by torch's version counters, which miss changes
        through ``.data``), and the generator was seeded with the same seed and not used since.
        """
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None:
            return None
        if (
            any(before is not now for before, now in zip(prefetched.tokens, tokens, strict=True))
            or prefetched.versions != self._versions(tokens)
            or not self._generator.get_state().equal(prefetched.generator_before)
        ):
            if not self.useful:
                logger.info("forward prefetch is off: parameters or batches change between updates")
            return None
        self._missed = 0
        self._generator.set_state(prefetched.generator_after)
        return prefetched.result

    def _versions(self, tokens: Sequence[Tensor]) -> list[int]:
        return [self._flat.version(), *(part._version for part in tokens)]
