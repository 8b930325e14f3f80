"""Replace one attribute of fairseq by a wrapper of it."""

import functools
from collections.abc import Callable
from typing import Any


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function, method or property ``owner.name`` by ``wrapper(original, ...)``."""
    found = getattr(owner, name)
    original: Any = found.fget if isinstance(found, property) else found

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, property(wrapped) if isinstance(found, property) else wrapped)
