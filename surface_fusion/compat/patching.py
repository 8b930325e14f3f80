"""Replace attributes of fairseq: permanently by a wrapper, or temporarily by a value."""

import builtins
import contextlib
import functools
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from types import ModuleType
from typing import Any

FAIRSEQ_VERSIONS = "ve-fairseq 0.12.3, fairseq-fixed 0.12.3.1"
"""The uploads of fairseq's main branch, which facebookresearch no longer releases."""


@dataclass(frozen=True)
class Repair:
    """One wrapper of one attribute of fairseq.

    Attributes:
        owner: dotted name of the module or class.
        attribute: name of its function or method; ``eval`` or ``open`` for the builtin as a module uses it.
        wrapper: is called as ``wrapper(original, *args, **kwargs)``.
        fault: what fairseq does, in one sentence.
        probe: function in ``tests/compat/probes`` that returns True if plain fairseq has the fault. Its
            parameter, if it has one, is *owner*.
        report: issues of facebookresearch/fairseq, such as "fs 5036", or "none".
        fairseq_version: releases in which the fault was seen.
    """

    owner: str
    attribute: str
    wrapper: Callable[..., Any]
    fault: str
    probe: str
    report: str = "none"
    fairseq_version: str = FAIRSEQ_VERSIONS

    @property
    def name(self) -> str:
        """Dotted name of the attribute."""
        return f"{self.owner}.{self.attribute}"

    def apply(self) -> None:
        """Wrap the attribute; also in ``__main__`` if that is the owner, run by ``python -m``."""
        owner = pkgutil.resolve_name(self.owner)
        for place in command_modules(owner) if isinstance(owner, ModuleType) else [owner]:
            wrap(place, self.attribute, self.wrapper)


def wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function or method ``owner.name`` by ``wrapper(original, ...)``.

    ``torch.jit.script`` reads the source of the wrapped function but resolves names in the wrapper's globals,
    so the wrapper is given the original's globals.
    """
    original: Any = getattr(owner, name) if hasattr(owner, name) else getattr(builtins, name)

    def call(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    names = getattr(original, "__globals__", call.__globals__)  # classes and builtins have none
    wrapped = types.FunctionType(call.__code__, names, name, None, call.__closure__)
    setattr(owner, name, functools.update_wrapper(wrapped, original))


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
    """The module *command*, and ``__main__`` if that is *command* run by ``python -m``."""
    running = sys.modules.get("__main__")
    spec = getattr(running, "__spec__", None)
    same = running is not None and spec is not None and spec.name == command.__name__
    return [command, running] if same and running is not None else [command]
