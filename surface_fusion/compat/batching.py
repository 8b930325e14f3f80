"""Data sets: name missing or empty data, skip overlong sentences, keep the last batch."""

import logging
import os
from collections.abc import Callable
from typing import Any

import numpy as np
from fairseq import utils

from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def name_missing_data(setup_task: Callable[..., Any], cfg: Any, **kwargs: Any) -> Any:
    """fairseq's ``setup_task``; names a data folder or dictionary that is missing, in one line."""
    folders = utils.split_paths(str(getattr(cfg, "data", None) or ""))
    for folder in filter(None, folders):  # dummy tasks have no folder
        if "://" not in folder and not os.path.isdir(folder):
            raise SurfaceFusionError(
                f"data folder {folder} does not exist; give the folder that fairseq-preprocess wrote"
            )
    try:
        return setup_task(cfg, **kwargs)
    except FileNotFoundError as error:
        raise SurfaceFusionError(
            f"data folder {folders[0]} has no {os.path.basename(str(error.filename))}; give the folder "
            "that fairseq-preprocess wrote, and the languages of its files"
        ) from error


def name_empty_data(load_dataset: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``load_indexed_dataset``; names an empty data file, in one line."""
    if os.path.isfile(path + ".bin") and os.path.getsize(path + ".bin") == 0:
        raise SurfaceFusionError(
            f"data file {path}.bin has no sentences; preprocess a text that is not empty"
        )
    return load_dataset(path, *args, **kwargs)


def keep_last_batch(
    batch_by_size: Callable[..., Any],
    indices: Any,
    num_tokens_fn: Callable[[int], int],
    num_tokens_vec: Any = None,
    max_tokens: int | None = None,
    **kwargs: Any,
) -> Any:
    """fairseq's ``batch_by_size``; appends the last batch if fairseq drops it.

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


def skip_overlong_sentences(
    filter_indices_by_size: Callable[..., Any],
    task: Any,
    indices: Any,
    dataset: Any,
    max_positions: Any = None,
    ignore_invalid_inputs: bool = False,
) -> Any:
    """fairseq's ``filter_indices_by_size``; skips and counts overlong sentences in all commands.

    Raises:
        SurfaceFusionError: no sentence pair remains.
    """
    kept = filter_indices_by_size(task, indices, dataset, max_positions, ignore_invalid_inputs=True)
    if len(kept) == 0 and getattr(dataset, "tgt", None) is not None:
        raise SurfaceFusionError(
            f"none of the {len(indices)} sentence pairs fits the model's positions {max_positions}; "
            "raise --max-source-positions and --max-target-positions or split the text"
        )
    return kept


def accept_split_training_sets(
    init: Callable[..., None], dataset: Any, datasets: Any, sample_ratios: Any = 1
) -> None:
    """fairseq's ``ConcatDataset.__init__``; reads the default -1 of ``--upsample-primary`` as 1."""
    if not isinstance(sample_ratios, int):
        sample_ratios = [1 if ratio < 0 else ratio for ratio in sample_ratios]
    init(dataset, datasets, sample_ratios)
