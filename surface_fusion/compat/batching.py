"""Report missing data, skip overlong sentences, read split training sets."""

import os
from collections.abc import Callable
from typing import Any

from fairseq import tasks, utils
from fairseq.data import ConcatDataset, data_utils
from fairseq.tasks import FairseqTask

from surface_fusion.compat.patching import wrap
from surface_fusion.errors import SurfaceFusionError


def explain_missing_data() -> None:
    """Name the data folder, dictionary or data file that is missing or empty, in one line."""

    def setup(original: Callable[..., Any], cfg: Any, **kwargs: Any) -> Any:
        folders = utils.split_paths(str(getattr(cfg, "data", None) or ""))
        for folder in filter(None, folders):  # dummy tasks have no folder
            if "://" not in folder and not os.path.isdir(folder):
                raise SurfaceFusionError(
                    f"data folder {folder} does not exist; give the folder that fairseq-preprocess wrote"
                )
        try:
            return original(cfg, **kwargs)
        except FileNotFoundError as error:
            raise SurfaceFusionError(
                f"data folder {folders[0]} has no {os.path.basename(str(error.filename))}; give the folder "
                "that fairseq-preprocess wrote, and the languages of its files"
            ) from error

    def load(original: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        if os.path.isfile(path + ".bin") and os.path.getsize(path + ".bin") == 0:
            raise SurfaceFusionError(
                f"data file {path}.bin has no sentences; preprocess a text that is not empty"
            )
        return original(path, *args, **kwargs)

    wrap(tasks, "setup_task", setup)
    wrap(data_utils, "load_indexed_dataset", load)


def skip_overlong_sentences() -> None:
    """Skip and count sentences longer than the model's positions (fs 1853, 2998, 2650).

    fairseq does so in training, but raises at the first such sentence in validation and generation.
    """

    def keep_short(
        original: Callable[..., Any],
        self: Any,
        indices: Any,
        dataset: Any,
        max_positions: Any = None,
        ignore_invalid_inputs: bool = False,
    ) -> Any:
        kept = original(self, indices, dataset, max_positions, ignore_invalid_inputs=True)
        if len(kept) == 0 and getattr(dataset, "tgt", None) is not None:
            raise SurfaceFusionError(
                f"none of the {len(indices)} sentence pairs fits the model's positions {max_positions}; "
                "raise --max-source-positions and --max-target-positions or split the text"
            )
        return kept

    wrap(FairseqTask, "filter_indices_by_size", keep_short)


def accept_split_training_sets() -> None:
    """Accept train, train1, ... when ``--upsample-primary`` has its default -1 (fs 3644)."""

    def init(original: Callable[..., None], self: Any, datasets: Any, sample_ratios: Any = 1) -> None:
        if not isinstance(sample_ratios, int):
            sample_ratios = [1 if ratio < 0 else ratio for ratio in sample_ratios]
        original(self, datasets, sample_ratios)

    wrap(ConcatDataset, "__init__", init)
