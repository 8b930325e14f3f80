"""The cached modules are updated whenever a module is added, replaced or removed."""

import copy
from typing import Any

import pytest
from fairseq.models import FairseqEncoder
from torch import nn

from surface_fusion.modules.module_tree import ModuleTree


class Counter(nn.Module):
    """A module that uses the number of updates."""

    def __init__(self) -> None:
        super().__init__()
        self.updates: list[int] = []

    def set_num_updates(self, num_updates: int) -> None:
        self.updates.append(num_updates)


class Calls(nn.Linear):
    """A module that counts the calls of ``train``."""

    def train(self, mode: bool = True) -> "Calls":
        return super().train(mode)


@pytest.fixture
def root() -> Any:
    shared = nn.Linear(2, 2)
    return nn.Sequential(nn.ModuleList([nn.Linear(2, 2), nn.Dropout()]), shared, nn.Sequential(shared))


def test_a_model_is_in_a_mode_if_all_its_modules_are(root: Any) -> None:
    tree = ModuleTree()
    assert tree.in_mode(root, True) and not tree.in_mode(root, False)
    root[0][1].eval()
    assert not tree.in_mode(root, True) and not tree.in_mode(root, False)
    root.eval()
    assert tree.in_mode(root, False)


def test_added_and_removed_modules_are_noticed(root: Any) -> None:
    tree = ModuleTree()
    root.eval()
    assert tree.in_mode(root, False)
    root[0].append(nn.Dropout())
    assert not tree.in_mode(root, False)
    root.eval()
    root[2].inner = nn.Sequential(nn.Dropout())
    assert not tree.in_mode(root, False)
    del root[2].inner
    assert tree.in_mode(root, False)
    root[0]._modules["0"] = nn.Linear(2, 2)  # without any hook of torch
    assert not tree.in_mode(root, False)
    root[0]._modules["0"] = None
    assert tree.in_mode(root, False)


def test_another_root_is_another_tree(root: Any) -> None:
    tree = ModuleTree()
    assert tree.in_mode(root, True)
    assert not tree.in_mode(nn.Sequential(nn.Dropout().eval()), True)


def test_a_module_that_overrides_train_is_always_called(root: Any) -> None:
    root.append(Calls(2, 2))
    assert not ModuleTree().in_mode(root, True)
    assert ModuleTree(Calls.train).in_mode(root, True)


def test_each_module_that_uses_the_number_of_updates_gets_it_once() -> None:
    encoder = FairseqEncoder(None)
    counter, inner = Counter(), Counter()
    root = nn.Sequential(counter, nn.Sequential(counter), encoder)
    tree = ModuleTree()
    tree.set_num_updates(root, 3)
    encoder.inner = inner
    tree.set_num_updates(root, 4)
    assert counter.updates == [3, 4] and inner.updates == [4]


def test_a_copy_made_in_a_constant_block_notices_changes(root: Any) -> None:
    """As fairseq copies a model in an update, for --store-ema."""
    tree = ModuleTree()
    with tree.constant(root):
        copied = copy.deepcopy(tree)
    assert copied.in_mode(root, root.training)
    root.added = nn.Linear(1, 1).train(not root.training)
    assert not copied.in_mode(root, root.training)
