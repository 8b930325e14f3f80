"""With ``--grouped-shuffling``, the batches of the next epoch are made while this one trains.

fairseq then makes other batches for each epoch, and all GPUs wait for it: on 620,000 sentence pairs a quarter
of a second. Here a process beside the data loader's workers makes them, one epoch ahead, the same ones.
"""

import copy
import itertools
import logging
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset

Batches = Sequence[Any]


class _Epochs(IterableDataset[tuple[Tensor, list[int]]]):
    """The batches of one epoch after the other, each as its sentences in a row and the batches' lengths."""

    def __init__(self, make: Callable[[int], Batches], first: int) -> None:
        self.make, self.first = make, first

    def __iter__(self) -> Iterator[tuple[Tensor, list[int]]]:
        logging.disable()  # the same is said at the start of each epoch
        for epoch in itertools.count(self.first):
            batches = self.make(epoch)
            yield torch.from_numpy(np.concatenate(batches)), [len(batch) for batch in batches]


class _Ahead:
    """What one dataset's iterators have in common, and batches for the ones to come.

    Args:
        make: an epoch's iterator as fairseq makes it.
        epoch: of the first.
        wanted: what it was asked for with, but for the epoch.
    """

    def __init__(self, make: Callable[[int], Any], epoch: int, dataset: Any, wanted: dict[str, Any]) -> None:
        self._make, self._dataset, self._wanted = make, dataset, wanted
        self._next = epoch
        self._loader: Optional[Iterator[tuple[Tensor, list[int]]]] = None
        self._unused: Any = None

    def __reduce__(self) -> tuple[type[None], tuple[()]]:
        return type(None), ()  # a copy of the task has none

    def is_for(self, epoch: int, dataset: Any, wanted: dict[str, Any]) -> bool:
        """Whether this epoch was expected."""
        return epoch == self._next and dataset is self._dataset and wanted == self._wanted

    def iterator(self) -> Any:
        """The next epoch's; from the second on, when there seem to be several, others are made meanwhile."""
        epoch = self._next
        self._next += 1
        if self._loader is not None:
            numbers, lengths = next(self._loader)
            iterator = copy.copy(self._unused)
            iterator.epoch = epoch
            iterator.batch_sampler = np.split(numbers.numpy(), np.cumsum(lengths)[:-1])
            iterator._frozen_batches = tuple(iterator.batch_sampler)
            self._dataset.set_epoch(epoch)
            return iterator
        iterator = self._make(epoch)
        if self._unused is not None:
            epochs = _Epochs(lambda epoch: self._make(epoch).frozen_batches, self._next)
            generator = torch.Generator()  # its own: torch's goes on as if nothing had been
            how: dict[str, Any] = {"num_workers": 1, "prefetch_factor": 1, "generator": generator}
            self._loader = iter(DataLoader(epochs, batch_size=None, collate_fn=_as_it_is, **how))
        self._unused = copy.copy(iterator)
        return iterator


def _as_it_is(epoch: Any) -> Any:
    return epoch


def make_batches_ahead(
    get_batch_iterator: Callable[..., Any], task: Any, dataset: Any, *args: Any, **kwargs: Any
) -> Any:
    """fairseq's ``FairseqTask.get_batch_iterator``; each epoch's batches are ready when it is asked for them.

    Where they are others each epoch, data workers are wanted, and these need not know the epoch.
    """
    epoch = kwargs.pop("epoch", 1)

    def make(epoch: int) -> Any:
        return get_batch_iterator(task, dataset, *args, epoch=epoch, **kwargs)

    if (
        args
        or not kwargs.get("update_epoch_batch_itr")
        or kwargs.get("num_workers", 0) == 0
        or getattr(task.cfg, "rebuild_batches", False)
        or not task.can_reuse_epoch_itr(dataset)
    ):
        return make(epoch)
    ahead: Optional[_Ahead] = getattr(task, "batches_ahead", None)
    if ahead is None or not ahead.is_for(epoch, dataset, kwargs):
        ahead = task.batches_ahead = _Ahead(make, epoch, dataset, kwargs)
    return ahead.iterator()
