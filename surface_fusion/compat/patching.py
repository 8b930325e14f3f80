"""Replace one attribute of fairseq by a wrapper of it."""

import functools
import sys
from collections.abc import Callable
from types import ModuleType
from typing import Any


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function, method or property ``owner.name`` by ``wrapper(original, ...)``."""
    found = getattr(owner, name)
    original: Any = found.fget if isinstance(found, property) else found

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, property(wrapped) if isinstance(found, property) else wrapped)


def command_modules(command: ModuleType) -> list[ModuleType]:
    """The module *command* of ``fairseq_cli``, and the one that runs if Python was started with ``-m`` it."""
    running = sys.modules.get("__main__")
    spec = getattr(running, "__spec__", None)
    same = running is not None and spec is not None and spec.name == command.__name__
    return [command, running] if same and running is not None else [command]
