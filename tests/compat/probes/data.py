"""Faults in data sets, batches and tasks."""

import argparse
import copy
import inspect
import pkgutil
import tempfile
from pathlib import Path

import numpy as np
import torch
from fairseq import tasks, utils
from fairseq.data import ConcatDataset, Dictionary, LanguagePairDataset, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from fairseq.nan_detector import NanDetector
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationConfig
from fairseq_cli import eval_lm, generate, validate

from tests.compat.probes.expect import error_of, fails


def missing_folder_is_not_named() -> bool:
    args = argparse.Namespace(_name="translation", data="/nowhere/at all", source_lang="en", target_lang="ro")
    return "does not exist" not in str(error_of(tasks.setup_task, args))


def empty_data_file_is_not_named() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "train.en.bin").touch()
        error = error_of(data_utils.load_indexed_dataset, f"{folder}/train.en", Dictionary())
        return "train.en.bin" not in str(error)


def last_batch_is_dropped() -> bool:
    batches = data_utils.batch_by_size(
        np.arange(60),
        num_tokens_fn=lambda i: 5,
        num_tokens_vec=np.full(60, 5),
        max_tokens=200,
        required_batch_size_multiple=8,
    )
    return sum(map(len, batches)) < 60


def overlong_sentence_is_fatal() -> bool:
    words = Dictionary()
    sizes = np.array([3, 50])
    data = LanguagePairDataset([torch.full((n,), words.eos()) for n in sizes], sizes, words)
    return fails(FairseqTask(argparse.Namespace()).filter_indices_by_size, np.arange(2), data, 10)


def split_data_needs_flag() -> bool:
    part = argparse.Namespace(sizes=np.arange(3))
    parts = ConcatDataset.__new__(ConcatDataset)
    parts.datasets, parts.sample_ratios = [part, part], [TranslationConfig().upsample_primary, 1]
    return fails(lambda: parts.sizes, error=ValueError)


def removed_names_of_numpy_are_used(owner: str) -> bool:
    """By its code: older versions of numpy have the names."""
    code = inspect.getsource(pkgutil.resolve_name(owner))
    return "np.compat.long" in code or "interpolation=" in inspect.getsource(data_utils.get_buckets)


def generate_ignores_shards() -> bool:
    """By its code: fairseq's other commands read ``dataset.num_shards``."""
    return "dataset.num_shards" not in inspect.getsource(generate)


def validate_ignores_shards() -> bool:
    """By its code, as of ``generate``."""
    return "dataset.num_shards" not in inspect.getsource(validate)


def batches_are_split_into_shards() -> bool:
    """Of eight sentences in one batch, the second of two shards has none; by its code, so does eval-lm."""
    words, sizes = Dictionary(), np.full(8, 5)
    data = LanguagePairDataset([torch.full((5,), words.eos())] * 8, sizes, words)
    task = FairseqTask(argparse.Namespace())
    iterator = task.get_batch_iterator(data, max_sentences=8, num_shards=2, shard_id=1)
    empty = not any(batch for batch in iterator.next_epoch_itr(shuffle=False))
    return empty and "dataset.num_shards" in inspect.getsource(eval_lm)


def task_cannot_be_copied() -> bool:
    return fails(copy.deepcopy, FairseqTask(argparse.Namespace()), error=RecursionError)


def nan_detector_fails() -> bool:
    class Encoder(torch.nn.Linear):
        def forward(self, x: torch.Tensor) -> dict[str, list[torch.Tensor]]:  # type: ignore[override]
            return {"encoder_out": [super().forward(x)]}

    with NanDetector(model := Encoder(2, 2)):
        return fails(model, torch.ones(1, 2), error=StopIteration)


def second_copy_is_refused() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for place in ("a", "b"):
            package = Path(folder, place, "some_plugin")
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
        utils.import_user_module(argparse.Namespace(user_dir=f"{folder}/a/some_plugin"))
        other = argparse.Namespace(user_dir=f"{folder}/b/some_plugin")
        return fails(utils.import_user_module, other, error=ImportError)


def removed_data_is_read() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        builder = MMapIndexedDatasetBuilder(f"{folder}/train.bin", dtype=np.int32)
        builder.add_item(torch.tensor([5, 6, 2]))
        builder.finalize(f"{folder}/train.idx")
        data = data_utils.load_indexed_dataset(f"{folder}/train")
        for path in Path(folder).iterdir():
            path.unlink()
        return data[0].tolist() == [5, 6, 2]
