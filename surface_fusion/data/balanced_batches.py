"""Balance the load of GPUs with ``--grouped-shuffling``: batches of one update cost about the same.

GPUs wait for each other in every update. fairseq groups batches that are neighbours when sorted by sentence
length, but their token counts differ: on 103,000 sentence pairs in batches of 16,384 tokens, the larger of
two had 15 % more tokens than their mean; sorted by tokens, 0.5 %. On GPUs, time depends on the rows of the
captured graph, which are rounded up, so batches are sorted by these rows first.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np

from surface_fusion.packed.batch import Capacity, capacity_for


def balance_batches(iterator: Any, rounded: bool) -> None:
    """Sort the batches of *iterator* by cost, if it groups neighbours (``--grouped-shuffling``).

    The largest come first, because fairseq drops the batches after the last complete group.

    Args:
        iterator: an ``EpochBatchIterator``.
        rounded: whether CUDA graphs run the batches, whose sizes are rounded up.
    """
    if getattr(iterator, "grouped_shuffling", False) and iterator.num_shards > 1:
        batches = iterator.frozen_batches
        keys = _costs(iterator.dataset, batches, rounded)
        # A stable sort: fairseq may return the same iterator each epoch, a resumed training builds a new one.
        order = np.lexsort([-key for key in keys])
        iterator._frozen_batches = tuple(batches[i] for i in order)


def _costs(dataset: Any, batches: Sequence[Any], rounded: bool) -> list[Any]:
    """Sort keys of the batches, the most important last: costs of packed batches, or tokens if not pairs."""
    if getattr(dataset, "tgt_sizes", None) is None:
        return [np.array([sum(int(dataset.num_tokens(i)) for i in batch) for batch in batches])]
    sentences = np.concatenate(batches)
    counts = [len(batch) for batch in batches]
    starts = np.cumsum([0, *counts[:-1]])
    sides = [np.asarray(sizes, dtype=np.int64)[sentences] for sizes in (dataset.src_sizes, dataset.tgt_sizes)]
    rows: list[Any] = [np.add.reduceat(side, starts) for side in sides]
    costs: list[Any] = [Capacity(src=rows[0], tgt=rows[1], padded=0).cost]  # of all batches at once
    if rounded:  # the cost of the CUDA graph that runs the batch
        widths = (np.maximum.reduceat(side, starts).tolist() for side in sides)
        shapes = zip(counts, *widths, rows[1].tolist(), strict=True)
        costs.append(np.array([capacity_for(*shape).cost for shape in shapes]))
    return costs
