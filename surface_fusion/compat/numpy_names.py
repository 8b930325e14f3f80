"""Run functions of fairseq that use names which numpy has removed."""

import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np

from surface_fusion.compat.patching import replaced


class _OldNumpy:
    """numpy with the removed names."""

    compat = SimpleNamespace(long=int)

    @staticmethod
    def percentile(*args: Any, interpolation: Any = "linear", **kwargs: Any) -> Any:
        return np.percentile(*args, method=interpolation, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(np, name)


def with_removed_names(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """A function of fairseq; ``np`` in its module also has the removed names."""
    with replaced(sys.modules[function.__module__], "np", _OldNumpy()):
        return function(*args, **kwargs)
