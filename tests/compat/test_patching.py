"""Attributes are wrapped, or replaced for a block and restored as they were."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from surface_fusion.compat.patching import arguments, replaced, wrap


def test_an_attribute_is_restored_after_an_error() -> None:
    owner = SimpleNamespace(name=1)
    with pytest.raises(KeyError), replaced(owner, "name", 2):
        assert owner.name == 2
        raise KeyError
    assert owner.name == 1


def test_a_static_method_is_restored_as_one() -> None:
    class Owner:
        @staticmethod
        def double(x: int) -> int:
            return 2 * x

    with replaced(Owner, "double", staticmethod(lambda x: 3 * x)):
        assert Owner().double(1) == 3
    assert Owner().double(1) == 2


def test_a_wrapper_sees_the_arguments_of_a_call_by_name() -> None:
    """Also one around another wrapper, whose parameters have no names."""

    def power(base: int, exponent: int = 2) -> int:
        return base**exponent

    def keep(original: Callable[..., int], *args: int, **kwargs: int) -> int:
        return original(*args, **kwargs)

    def describe(original: Callable[..., int], *args: int, **kwargs: int) -> tuple[dict[str, int], int]:
        return arguments(original, *args, **kwargs), original(*args, **kwargs)

    owner = SimpleNamespace(power=power)
    for wrapper in (keep, describe):
        wrap(owner, "power", wrapper)
    assert owner.power(3) == ({"base": 3, "exponent": 2}, 9)
    assert owner.power(exponent=3, base=2) == ({"base": 2, "exponent": 3}, 8)
