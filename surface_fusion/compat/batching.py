"""Data sets: name missing or empty data, skip overlong sentences, keep the last batch."""

import logging
import os
from typing import Any

import numpy as np
from fairseq import utils

from surface_fusion.compat.patching import Original, arguments, repair
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


@repair("fairseq.tasks.setup_task", probe="missing_folder_is_not_named")
def name_missing_data(setup_task: Original, cfg: Any, **kwargs: Any) -> Any:
    """Name a data folder or dictionary that is missing, in one line."""
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


@repair("fairseq.data.data_utils.load_indexed_dataset", probe="empty_data_file_is_not_named")
def name_empty_data(load_dataset: Original, path: str, *args: Any, **kwargs: Any) -> Any:
    """Name an empty data file, in one line."""
    if os.path.isfile(path + ".bin") and os.path.getsize(path + ".bin") == 0:
        raise SurfaceFusionError(
            f"data file {path}.bin has no sentences; preprocess a text that is not empty"
        )
    return load_dataset(path, *args, **kwargs)


@repair("fairseq.data.data_utils.batch_by_size", probe="last_batch_is_dropped", report="fs 5036")
def keep_last_batch(batch_by_size: Original, *args: Any, **kwargs: Any) -> Any:
    """Keep the last batch, which fairseq drops if its size is not a multiple of 8.

    A sentence longer than ``--max-tokens`` is skipped, with a warning. fairseq skips it in training only and
    fails elsewhere.
    """
    given = arguments(batch_by_size, *args, **kwargs)
    indices, sizes, limit = as_array(given["indices"]), given["num_tokens_vec"], given["max_tokens"]
    variable = given["fixed_shapes"] is None
    if limit is not None and variable:
        fits = np.asarray([*map(given["num_tokens_fn"], indices)] if sizes is None else sizes) <= limit
        if not fits.all():
            logger.warning(
                f"{(~fits).sum()} samples are longer than --max-tokens {limit} and will be skipped, "
                f"first few sample ids={indices[~fits][:10].tolist()}"
            )
            indices = indices[fits]
            given["num_tokens_vec"] = None if sizes is None else np.asarray(sizes)[fits]
    if len(indices) == 0:
        return []  # fairseq would access a last batch and fail
    batches = list(batch_by_size(**{**given, "indices": indices}))
    kept = sum(map(len, batches))
    if kept < len(indices) and variable:
        batches.append(indices[kept:])
    return batches


def as_array(indices: Any) -> Any:
    """The *indices* of sentences, an array or an iterable, as an array."""
    return indices if isinstance(indices, np.ndarray) else np.fromiter(indices, dtype=np.int64)


@repair(
    "fairseq.tasks.fairseq_task.FairseqTask.filter_indices_by_size",
    probe="overlong_sentence_is_fatal",
    report="fs 1853, 2998, 2650",
)
def skip_overlong_sentences(filter_indices: Original, *args: Any, **kwargs: Any) -> Any:
    """Skip and count sentences longer than the model's positions, unless these are all; fairseq fails."""
    given = arguments(filter_indices, *args, **kwargs)
    kept = filter_indices(**{**given, "ignore_invalid_inputs": True})
    if len(kept) == 0 and getattr(given["dataset"], "tgt", None) is not None:
        raise SurfaceFusionError(
            f"none of the {len(given['indices'])} sentence pairs fits the model's positions "
            f"{given['max_positions']}; raise --max-source-positions and --max-target-positions or split "
            "the text"
        )
    return kept


@repair("fairseq.data.concat_dataset.ConcatDataset.__init__", probe="split_data_needs_flag", report="fs 3644")
def accept_split_training_sets(init: Original, dataset: Any, datasets: Any, sample_ratios: Any = 1) -> None:
    """Read the default -1 of ``--upsample-primary`` as 1, so that train, train1, ... can be read."""
    if not isinstance(sample_ratios, int):
        sample_ratios = [1 if ratio < 0 else ratio for ratio in sample_ratios]
    init(dataset, datasets, sample_ratios)
