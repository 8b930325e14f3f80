"""With ``--grouped-shuffling``, batches that GPUs work on at the same time cost the same.

GPUs wait for each other in every update. fairseq groups neighbours in its order by length, whose numbers of
tokens differ: on 103,000 sentence pairs in batches of 16,384 the larger of two was 15 % above their mean (4 %
with the padding counted). In an order by tokens it is 0.5 % (2.5 %).
"""

from collections.abc import Callable
from typing import Any

import numpy as np


def group_evenly(get_train_iterator: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``Trainer.get_train_iterator``; the same batches, in the order of their cost.

    The largest come first: fairseq leaves out what is behind the last whole group.
    """
    iterator = get_train_iterator(trainer, *args, **kwargs)
    if getattr(iterator, "grouped_shuffling", False) and iterator.num_shards > 1:
        batches = iterator.frozen_batches
        costs = [_cost(iterator.dataset, batch) for batch in batches]
        iterator._frozen_batches = tuple(batches[i] for i in np.argsort(costs, kind="stable")[::-1])
    return iterator


def _cost(dataset: Any, batch: Any) -> int:
    """Tokens; the decoder and the loss do twice the encoder's work on each."""
    if getattr(dataset, "tgt_sizes", None) is None:
        return sum(int(dataset.num_tokens(i)) for i in batch)
    indices = np.asarray(batch)
    return int(dataset.src_sizes[indices].sum() + 2 * dataset.tgt_sizes[indices].sum())
