"""Cache the list of a model's modules, and walk the tree again only after a module was changed.

torch and fairseq walk over all modules several times per update (``train()``, ``set_num_updates()``): 4 ms of
an 8 ms update with 2,048 tokens on an H200. Comparing the children of all modules with those of the last walk
is much faster.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from fairseq.models import BaseFairseqModel, FairseqEncoder
from torch import nn


class ModuleTree:
    """The cached modules below one root.

    Args:
        plain_train: ``train`` methods, besides torch's, that have no effect if the mode does not change.
    """

    def __init__(self, *plain_train: Any) -> None:
        self._plain_train = {nn.Module.train, *plain_train}
        self._all: list[nn.Module] = []
        self._children: list[Any] = []
        self._all_plain = False
        self._counting: list[Any] = []
        self._constant = False

    def __deepcopy__(self, memo: Any) -> "ModuleTree":
        """A copied model has other modules, and is not in a :meth:`constant` block."""
        return ModuleTree(*self._plain_train)

    @contextmanager
    def constant(self, root: nn.Module) -> Iterator[None]:
        """Look for changed modules once, at the start of the block, not in each call in it."""
        self._update(root)
        self._constant = True
        try:
            yield
        finally:
            self._constant = False

    def _update(self, root: nn.Module) -> None:
        if self._constant:
            return
        if self._all and self._all[0] is root and _children(self._all) == self._children:
            return
        self._all = [root]
        for module in self._all:  # breadth first; the list grows meanwhile
            self._all += [child for child in _children([module]) if child is not None]
        self._children = _children(self._all)
        self._all_plain = all(type(module).train in self._plain_train for module in self._all)
        # fairseq's two methods only pass the number on to submodules.
        skipped = (None, BaseFairseqModel.set_num_updates, FairseqEncoder.set_num_updates)
        self._counting = [
            module
            for module in dict.fromkeys(self._all[1:])
            if getattr(type(module), "set_num_updates", None) not in skipped
        ]

    def in_mode(self, root: nn.Module, training: bool) -> bool:
        """Whether ``root.train(training)`` would change nothing."""
        self._update(root)
        return self._all_plain and {module.training for module in self._all} == {training}

    def set_num_updates(self, root: nn.Module, num_updates: int) -> None:
        """Pass *num_updates* to every module below *root* that uses it."""
        self._update(root)
        for module in self._counting:
            module.set_num_updates(num_updates)


def _children(modules: list[nn.Module]) -> list[Any]:
    """The children of *modules* in their order, with None where a module has none under a name."""
    return [child for module in modules for child in module._modules.values()]
