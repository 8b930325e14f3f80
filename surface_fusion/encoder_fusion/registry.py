"""The methods by name; :func:`register_encoder_fusion` adds one to the choices of ``--encoder-fusion``."""

import inspect
from collections.abc import Callable
from typing import Any, TypeVar

from surface_fusion.encoder_fusion.base import EncoderFusion, FusionMethod
from surface_fusion.encoder_fusion.layer_attention import LayerAttention
from surface_fusion.encoder_fusion.layer_combination import Combination
from surface_fusion.errors import SurfaceFusionError

PLACES = (EncoderFusion.place, LayerAttention.place, Combination.place)

Method = TypeVar("Method", bound=type[FusionMethod])

_methods: dict[str, type[FusionMethod]] = {}


def register_encoder_fusion(name: str) -> Callable[[Method], Method]:
    """Class decorator that makes a method available as ``--encoder-fusion`` *name*.

    Args:
        name: lower-case words separated by hyphens.

    Raises:
        SurfaceFusionError: another class has this name, or the class is not a method.
    """

    def register(method: Method) -> Method:
        if not issubclass(method, (EncoderFusion, LayerAttention, Combination)):
            raise SurfaceFusionError(
                f"--encoder-fusion {name}: {method.__qualname__} is not derived from EncoderFusion, "
                "LayerAttention or Combination; derive it from one"
            )
        other = _methods.get(name, method)
        # A class that is defined again, by a reload or in a notebook, replaces its former self.
        if (other.__module__, other.__qualname__) != (method.__module__, method.__qualname__):
            raise SurfaceFusionError(
                f"--encoder-fusion {name} is {other.__module__}.{other.__qualname__} already; register "
                f"{method.__module__}.{method.__qualname__} under another name"
            )
        method.name = name
        _methods[name] = method
        return method

    return register


def methods(place: type[FusionMethod] = FusionMethod) -> dict[str, type[FusionMethod]]:
    """Return the methods by name, in the order of ``PLACES``; with *place*, those of this base class."""
    selected = ((name, m) for name, m in _methods.items() if issubclass(m, place))
    return dict(sorted(selected, key=lambda pair: PLACES.index(pair[1].place)))


def options_of(method: type[FusionMethod]) -> dict[str, Any]:
    """Return the default of each option of *method*: the arguments of its constructor that have one."""
    parameters = inspect.signature(method).parameters.values()
    return {p.name: p.default for p in parameters if p.default is not p.empty}
