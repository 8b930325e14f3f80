"""Missing data is named, overlong sentences are skipped, and all others are kept."""

import argparse
import logging
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
from fairseq import tasks
from fairseq.data import ConcatDataset, Dictionary, LanguagePairDataset, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationConfig

from surface_fusion import SurfaceFusionError
from tests.helpers.tiny import data_folder


def test_missing_data_folder_is_named() -> None:
    with pytest.raises(SurfaceFusionError, match="data folder nowhere does not exist"):
        tasks.setup_task(argparse.Namespace(task="translation", data="nowhere"))


def test_missing_dictionary_is_named() -> None:
    args = argparse.Namespace(task="translation", data=data_folder(), source_lang="xx", target_lang="ro")
    with pytest.raises(SurfaceFusionError, match=r"has no dict\.xx\.txt"):
        tasks.setup_task(args)


def test_empty_data_file_is_named(tmp_path: Path) -> None:
    (tmp_path / "train.en.bin").touch()
    with pytest.raises(SurfaceFusionError, match=r"train\.en\.bin has no sentences"):
        data_utils.load_indexed_dataset(str(tmp_path / "train.en"), Dictionary())


@pytest.mark.parametrize("n", [0, 1, 7, 8, 9, 60])
@pytest.mark.parametrize("multiple", [1, 8])
def test_every_sentence_is_batched_once_and_in_order(n: int, multiple: int) -> None:
    sizes = np.full(n, 5)
    batches = data_utils.batch_by_size(
        np.arange(n),
        num_tokens_fn=lambda i: sizes[i],
        num_tokens_vec=sizes,
        max_tokens=100,
        required_batch_size_multiple=multiple,
    )
    assert [i for batch in batches for i in batch] == list(range(n))
    assert all(len(batch) * 5 <= 100 for batch in batches)


def test_a_sentence_longer_than_max_tokens_is_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    sizes = np.array([5, 600, 7])
    for vec in (sizes, None):
        batches = data_utils.batch_by_size(
            np.arange(3), num_tokens_fn=lambda i: sizes[i], num_tokens_vec=vec, max_tokens=400
        )
        assert [i for batch in batches for i in batch] == [0, 2]
    message = "1 samples are longer than --max-tokens 400 and will be skipped, first few sample ids=[1]"
    assert caplog.messages == [message, message]


def pairs(*sizes: int) -> LanguagePairDataset:
    words = Dictionary()
    rows = [torch.full((n,), words.eos()) for n in sizes]
    return LanguagePairDataset(rows, np.array(sizes), words, rows, np.array(sizes), words)


def test_overlong_sentences_are_skipped_and_counted(caplog: pytest.LogCaptureFixture) -> None:
    task = FairseqTask(argparse.Namespace())
    with caplog.at_level(logging.WARNING):
        kept = task.filter_indices_by_size(np.arange(3), pairs(5, 3000, 5), (1024, 1024))
    assert kept.tolist() == [0, 2]
    assert "1 samples have invalid sizes and will be skipped" in caplog.text


def test_skipping_every_sentence_is_an_error() -> None:
    task = FairseqTask(argparse.Namespace())
    with pytest.raises(SurfaceFusionError, match=r"none of the 2 sentence pairs fits .*\(1024, 1024\)"):
        task.filter_indices_by_size(np.arange(2), pairs(3000, 2000), (1024, 1024))


def test_data_in_several_folders(tmp_path: Path) -> None:
    """As without ``--upsample-primary``, and as with it."""
    folder = tmp_path / "data-bin"
    shutil.copytree(data_folder(), folder)
    for part, count in (("train", 2), ("train1", 3)):
        for language in ("en", "ro"):
            prefix = str(folder / f"{part}.en-ro.{language}")
            builder = MMapIndexedDatasetBuilder(f"{prefix}.bin")
            for i in range(count):
                builder.add_item(torch.tensor([5 + i, 2]))
            builder.finalize(f"{prefix}.idx")
    for primary, expected in ((-1, [0, 1, 0, 1, 2]), (1, [0, 1, 0, 1, 2]), (2, [0, 1, 0, 1, 0, 1, 2])):
        cfg = TranslationConfig(data=str(folder), source_lang="en", target_lang="ro")
        cfg.upsample_primary, cfg.dataset_impl = primary, "mmap"
        task = tasks.translation.TranslationTask.setup_task(cfg)
        task.load_dataset("train", combine=True)
        data = task.dataset("train")
        assert [int(data[i]["source"][0]) - 5 for i in range(len(data))] == expected
        assert len(data.src_sizes) == len(data)
    assert len(ConcatDataset([data, data], 2)) == 4 * len(data)
