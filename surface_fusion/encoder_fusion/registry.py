"""The methods by name; :func:`register_encoder_fusion` adds one to the choices of ``--encoder-fusion``."""

import inspect
import re
from collections.abc import Callable
from typing import Any, TypeVar

from surface_fusion.encoder_fusion.base import EncoderFusion, FusionMethod
from surface_fusion.encoder_fusion.layer_attention import LayerAttention
from surface_fusion.encoder_fusion.layer_combination import Combination
from surface_fusion.errors import SurfaceFusionError

BASES = (EncoderFusion, LayerAttention, Combination)

Method = TypeVar("Method", bound=type[FusionMethod])

_methods: dict[str, type[FusionMethod]] = {}


def register_encoder_fusion(name: str) -> Callable[[Method], Method]:
    """Class decorator that makes a method available as ``--encoder-fusion`` *name*.

    Args:
        name: lower-case words separated by hyphens.

    Raises:
        SurfaceFusionError: the name is not of this form, the class is no method, or either is registered.
    """
    if not re.fullmatch("[a-z0-9]+(-[a-z0-9]+)*", name):
        raise SurfaceFusionError(f"--encoder-fusion {name}: give lower-case words separated by hyphens")

    def register(method: Method) -> Method:
        if not (isinstance(method, type) and issubclass(method, BASES)):
            raise SurfaceFusionError(
                f"--encoder-fusion {name}: {getattr(method, '__qualname__', method)} is not derived from "
                "EncoderFusion, LayerAttention or Combination; derive it from one"
            )
        other = _methods.get(name, method)
        # A class that is defined again, by a reload or in a notebook, replaces its former self.
        if (other.__module__, other.__qualname__) != (method.__module__, method.__qualname__):
            raise SurfaceFusionError(
                f"--encoder-fusion {name} is {other.__module__}.{other.__qualname__} already; register "
                f"{method.__module__}.{method.__qualname__} under another name"
            )
        if vars(method).get("name", name) != name:
            raise SurfaceFusionError(
                f"--encoder-fusion {name}: {method.__qualname__} is registered as {method.name}; derive a "
                "class from it"
            )
        method.name = name
        _methods[name] = method
        return method

    return register


def methods(place: type[FusionMethod] = FusionMethod) -> dict[str, type[FusionMethod]]:
    """Return the methods by name, in the order of ``BASES``; with *place*, those of this base class."""
    selected = {name: method for name, method in _methods.items() if issubclass(method, place)}
    return {name: method for base in BASES for name, method in selected.items() if issubclass(method, base)}


def options_of(method: type[FusionMethod]) -> dict[str, Any]:
    """Return the default of each option of *method*: arguments of its constructor that have one.

    Arguments of the base class's constructor are set by the model and are not options.
    """
    parameters = inspect.signature(method).parameters.values()
    shared = inspect.signature(next(base for base in BASES if issubclass(method, base))).parameters
    return {p.name: p.default for p in parameters if p.default is not p.empty and p.name not in shared}
