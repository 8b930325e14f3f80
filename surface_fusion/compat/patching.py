"""Replace attributes of fairseq: permanently by a wrapper, or temporarily by a value."""

import builtins
import contextlib
import functools
import inspect
import pkgutil
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, TypeVar

Original = Callable[..., Any]
"""A function of fairseq, the first argument of its wrapper."""

Wrapper = TypeVar("Wrapper", bound=Callable[..., Any])


@dataclass(frozen=True)
class Repair:
    """One wrapper of one attribute of fairseq; see :func:`repair`."""

    name: str
    wrapper: Callable[..., Any]
    probe: str
    report: str

    @property
    def owner(self) -> str:
        """Dotted name of the module or class with the attribute."""
        return self.name.rpartition(".")[0]

    def apply(self) -> None:
        """Wrap the attribute; also in ``__main__`` if that is its module, run by ``python -m``."""
        attribute, main = self.name.rpartition(".")[2], sys.modules.get("__main__")
        wrap(pkgutil.resolve_name(self.owner), attribute, self.wrapper)
        if getattr(getattr(main, "__spec__", None), "name", None) == self.owner:
            wrap(main, attribute, self.wrapper)


def repair(*names: str, probe: str, report: str = "none") -> Callable[[Wrapper], Wrapper]:
    """Mark a function as a repair, which ``repairs.py`` applies.

    It is called as ``wrapper(original, *args, **kwargs)``. The first paragraph of its docstring says what it
    does; ``docs/repairs.md`` shows that.

    Args:
        names: dotted names of the attributes to wrap: a function, class or method, or ``eval`` or ``open``
            for the builtin as a module uses it.
        probe: function in ``tests/compat/probes`` that returns True if plain fairseq has the fault. Its
            parameter, if it has one, is the owner of the attribute.
        report: issues of facebookresearch/fairseq, such as "fs 5036".
    """

    def mark(wrapper: Wrapper) -> Wrapper:
        entries = [Repair(name, wrapper, probe, report) for name in names]
        vars(wrapper).setdefault("repairs", []).extend(entries)
        return wrapper

    return mark


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


def arguments(original: Original, *args: Any, **kwargs: Any) -> dict[str, Any]:
    """The arguments of a call of *original* by name, with its defaults."""
    bound = inspect.signature(original).bind(*args, **kwargs)
    bound.apply_defaults()
    return bound.arguments


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
