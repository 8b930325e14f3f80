"""Replace one attribute of fairseq by a wrapper of it."""

import functools
import sys
import types
from collections.abc import Callable
from types import ModuleType
from typing import Any


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function, method or property ``owner.name`` by ``wrapper(original, ...)``.

    ``torch.jit.script`` compiles the original: it takes the source of what a function wraps, but looks up
    names in the globals of the function itself, which are therefore the original's.
    """
    found = getattr(owner, name)
    original: Any = found.fget if isinstance(found, property) else found

    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    names = getattr(original, "__globals__", call.__globals__)  # a class has none
    wrapped = types.FunctionType(call.__code__, names, name, None, call.__closure__)
    functools.update_wrapper(wrapped, original)
    setattr(owner, name, property(wrapped) if isinstance(found, property) else wrapped)


def command_modules(command: ModuleType) -> list[ModuleType]:
    """The module *command* of ``fairseq_cli``, and the one that runs if Python was started with ``-m`` it."""
    running = sys.modules.get("__main__")
    spec = getattr(running, "__spec__", None)
    same = running is not None and spec is not None and spec.name == command.__name__
    return [command, running] if same and running is not None else [command]
