"""Keep the last batch of an epoch."""

import logging
from collections.abc import Callable
from typing import Any

import numpy as np

logger = logging.getLogger(__name__)


def keep_last_batch(
    batch_by_size: Callable[..., Any],
    indices: Any,
    num_tokens_fn: Callable[[int], int],
    num_tokens_vec: Any = None,
    max_tokens: int | None = None,
    **kwargs: Any,
) -> Any:
    """fairseq's ``batch_by_size``, which drops a last batch whose size is not a multiple of 8 (fs 5036).

    A sentence longer than ``--max-tokens`` is skipped, with a warning. fairseq skips it in training only and
    fails elsewhere.
    """
    if not isinstance(indices, np.ndarray):
        indices = np.fromiter(indices, dtype=np.int64, count=-1)
    if max_tokens is not None and kwargs.get("fixed_shapes") is None:
        sizes = [num_tokens_fn(i) for i in indices] if num_tokens_vec is None else num_tokens_vec
        fits = np.asarray(sizes) <= max_tokens
        if not fits.all():
            logger.warning(
                f"{(~fits).sum()} samples are longer than --max-tokens {max_tokens} and will be skipped, "
                f"first few sample ids={indices[~fits][:10].tolist()}"
            )
            indices = indices[fits]
            num_tokens_vec = None if num_tokens_vec is None else np.asarray(num_tokens_vec)[fits]
    if len(indices) == 0:
        return []  # fairseq would access a last batch and fail
    batches = list(batch_by_size(indices, num_tokens_fn, num_tokens_vec, max_tokens, **kwargs))
    kept = sum(len(b) for b in batches)
    if kept < len(indices) and kwargs.get("fixed_shapes") is None:
        batches.append(indices[kept:])
    return batches
