"""Replace attributes of fairseq: by a wrapper, or temporarily."""

import contextlib
import functools
import sys
import types
from collections.abc import Callable, Iterator
from types import ModuleType
from typing import Any


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function, method or property ``owner.name`` by ``wrapper(original, ...)``.

    ``torch.jit.script`` reads the source of the wrapped function but resolves names in the wrapper's globals,
    so the wrapper is given the original's globals.
    """
    found = getattr(owner, name)
    original: Any = found.fget if isinstance(found, property) else found

    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    names = getattr(original, "__globals__", call.__globals__)  # a class has none
    wrapped = types.FunctionType(call.__code__, names, name, None, call.__closure__)
    functools.update_wrapper(wrapped, original)
    setattr(owner, name, property(wrapped) if isinstance(found, property) else wrapped)


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to *value* for the duration of the block."""
    # vars() returns a staticmethod of a class as it is, getattr the function in it.
    before = vars(owner)[name] if name in vars(owner) else getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def command_modules(command: ModuleType) -> list[ModuleType]:
    """The module *command* of ``fairseq_cli``, and ``__main__`` if that is *command* run by ``python -m``."""
    running = sys.modules.get("__main__")
    spec = getattr(running, "__spec__", None)
    same = running is not None and spec is not None and spec.name == command.__name__
    return [command, running] if same and running is not None else [command]
