"""``StatefulContainer``, a part of each task: no endless recursion in copy and pickle."""

from collections.abc import Callable
from typing import Any


def find_no_attribute_before_init(get: Callable[..., Any], container: Any, name: str) -> Any:
    """fairseq's ``StatefulContainer.__getattr__``; raises AttributeError while the instance is empty.

    ``copy`` and ``pickle`` look up ``__setstate__`` on an empty instance, where fairseq recurses without end.
    """
    if "_factories" not in vars(container):
        raise AttributeError(f"{type(container).__name__} has no {name} yet")
    return get(container, name)
