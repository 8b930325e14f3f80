"""Attributes are replaced for a block and restored as they were."""

from types import SimpleNamespace

import pytest

from surface_fusion.compat.patching import replaced


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
