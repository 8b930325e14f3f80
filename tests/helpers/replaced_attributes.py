"""Run in a process of its own: the names of all functions and classes that importing the package replaces.

Input: the names of modules to watch, as JSON; they are imported first. Output: the sorted names, as JSON. An
attribute is replaced if it is new or has another value, and is or was a function, class, method or property.
"""

import contextlib
import importlib
import json
import sys
from types import ModuleType
from typing import Any


def attributes(names: list[str]) -> dict[str, Any]:
    """Attributes of the modules *names* and of the classes defined there, by dotted name."""
    values: dict[str, Any] = {}
    for module in (sys.modules.get(name) for name in names):
        if isinstance(module, ModuleType):
            for name, value in list(vars(module).items()):
                values[f"{module.__name__}.{name}"] = value
                if isinstance(value, type) and value.__module__ == module.__name__:
                    for attribute, member in list(vars(value).items()):
                        values[f"{value.__module__}.{value.__qualname__}.{attribute}"] = member
    return values


def is_code(value: Any) -> bool:
    """Whether *value* is a function, class, method or property."""
    return callable(value) or isinstance(value, (property, staticmethod, classmethod))


def main() -> None:
    """See above."""
    watched: list[str] = json.load(sys.stdin)
    for name in watched:
        with contextlib.suppress(Exception):  # some need what this machine lacks
            importlib.import_module(name)
    before = attributes(watched)
    assert "surface_fusion" not in sys.modules
    import surface_fusion  # noqa: F401

    after = attributes(watched)
    missing = object()
    changed = (name for name in after if after[name] is not before.get(name, missing))
    code = (name for name in changed if is_code(after[name]) or is_code(before.get(name)))
    print(json.dumps(sorted(code)))
