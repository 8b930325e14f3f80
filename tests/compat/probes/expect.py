"""Expect an error, and replace attributes of fairseq or torch for a moment."""

import contextlib
from collections.abc import Callable, Iterator
from typing import Any


def error_of(function: Callable[..., Any], *args: Any, **kwargs: Any) -> BaseException | None:
    """The error that the call raises, or None."""
    try:
        function(*args, **kwargs)
    except Exception as error:
        return error
    return None


def fails(
    function: Callable[..., Any], *args: Any, error: type[Exception] = Exception, **kwargs: Any
) -> bool:
    """Whether the call raises *error*; another error is raised."""
    raised = error_of(function, *args, **kwargs)
    if raised is None or isinstance(raised, error):
        return raised is not None
    raise raised


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set ``owner.name`` to *value* for the duration of the block."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)
