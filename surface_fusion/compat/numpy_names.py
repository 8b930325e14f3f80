"""Run functions of fairseq that use names which numpy has removed."""

import sys
from types import SimpleNamespace
from typing import Any

import numpy as np

from surface_fusion.compat.patching import Original, repair, replaced


def _percentile(*args: Any, interpolation: Any = "linear", **kwargs: Any) -> Any:
    return np.percentile(*args, method=interpolation, **kwargs)


OLD_NUMPY = SimpleNamespace(**{**vars(np), "compat": SimpleNamespace(long=int), "percentile": _percentile})


@repair(
    "fairseq.data.bucket_pad_length_dataset.get_buckets",
    "fairseq.data.audio.raw_audio_dataset.get_buckets",
    "fairseq.data.language_pair_dataset.LanguagePairDataset.__init__",
    "fairseq.data.token_block_dataset.TokenBlockDataset.__init__",
    probe="removed_names_of_numpy_are_used",
)
def with_removed_names(function: Original, *args: Any, **kwargs: Any) -> Any:
    """Provide names that numpy has removed, for ``--num-batch-buckets`` and ``--sample-break-mode eos``."""
    with replaced(sys.modules[function.__module__], "np", OLD_NUMPY):
        return function(*args, **kwargs)
