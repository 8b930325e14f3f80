"""The end of an epoch with several processes."""

from argparse import Namespace
from typing import Any

import pytest

from surface_fusion.compat.last_batches import leave_out_dummies


@pytest.mark.parametrize(
    ("given", "left"),
    [
        ([{"id": 1}, {"id": 2}], [{"id": 1}, {"id": 2}]),
        ([{"id": 1}, {}], [{"id": 1}]),
        ([{"id": 1}, None], [{"id": 1}]),
        ([{}, {}], [{}, {}]),  # one must stand for the process
    ],
)
def test_an_update_that_holds_batches_holds_no_dummy(given: list[Any], left: list[Any]) -> None:
    def train_step(trainer: Any, samples: list[Any], raise_oom: bool) -> tuple[list[Any], bool]:
        return samples, raise_oom

    assert leave_out_dummies(train_step, Namespace(is_fsdp=False), given, raise_oom=True) == (left, True)
    assert leave_out_dummies(train_step, Namespace(is_fsdp=True), given, True) == (given, True)
