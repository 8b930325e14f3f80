"""Reports on data sets, and on their preparation.

Tests ``compat/numpy_names.py``.
"""

from pathlib import Path

import pytest

from tests.conftest import RunFairseq
from tests.helpers.small_training import TRAIN

pytestmark = pytest.mark.slow


@pytest.mark.parametrize("criterion", ["label_smoothed_cross_entropy", "fused_label_smoothed_cross_entropy"])
def test_batches_by_buckets(run_fairseq: RunFairseq, data: Path, tmp_path: Path, criterion: str) -> None:
    """TypeError with numpy 2.4."""
    flags = ("--num-batch-buckets", 3, "--max-update", 2, "--save-dir", tmp_path, "--criterion", criterion)
    out = run_fairseq("train", data, *TRAIN, *flags).stdout
    assert "bucketing target lengths" in out and (tmp_path / "checkpoint_last.pt").is_file()


@pytest.mark.parametrize("mode", ["eos", "complete_doc"])
def test_language_model_by_break_mode(run_fairseq: RunFairseq, data: Path, tmp_path: Path, mode: str) -> None:
    """AttributeError with numpy 2.4 in the mode "eos"."""
    for split in ("train", "valid"):
        for end in ("bin", "idx"):
            (tmp_path / f"{split}.{end}").symlink_to(next(data.glob(f"{split}.*.en.{end}")))
    (tmp_path / "dict.txt").symlink_to(data / "dict.en.txt")
    flags = ("--task", "language_modeling", "-a", "transformer_lm", "--decoder-layers", 1, "--cpu")
    flags += ("--decoder-embed-dim", 16, "--decoder-ffn-embed-dim", 16, "--decoder-attention-heads", 2)
    flags += ("--sample-break-mode", mode, "--tokens-per-sample", 64, "--max-tokens", 400, "--num-workers", 0)
    flags += ("--optimizer", "adam", "--lr", 0.005, "--max-update", 2, "--save-dir", tmp_path)
    run_fairseq("train", tmp_path, *flags)
    assert (tmp_path / "checkpoint_last.pt").is_file()
