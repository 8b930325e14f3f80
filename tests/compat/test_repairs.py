"""What the repairs of fairseq do."""

import argparse
import collections
import copy
import io
import itertools
import logging
import os
import pickle
import re
import shutil
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fairseq import checkpoint_utils, hub_utils, search, tasks, utils
from fairseq.data import ConcatDataset, Dictionary, LanguagePairDataset, data_utils
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf

from surface_fusion import SurfaceFusionError
from surface_fusion.compat import warning_filters
from tests.helpers.paths import REFERENCE
from tests.helpers.tiny import SHARED, batch, build, data_folder, shaken

# -- checkpoints -------------------------------------------------------------------------------


def through_torch(value: object) -> object:
    file = io.BytesIO()
    torch.save(value, file)
    file.seek(0)
    return torch.load(file)  # weights_only, the default


@pytest.mark.parametrize(
    "value",
    [
        argparse.Namespace(lr=[0.1]),
        np.float64(1.5),
        np.float32(1.5),
        np.int64(3),
        np.array([1.0, 2.0]),
        collections.defaultdict(dict),
    ],
    ids=lambda value: type(value).__name__,
)
def test_what_fairseq_stores_loads_safely(value: object) -> None:
    loaded = through_torch({"value": value})["value"]
    assert np.array_equal(loaded, value) if isinstance(value, np.ndarray) else loaded == value


def test_numpy_1_names_load_under_numpy_2() -> None:
    data = pickle.dumps(np.float64(2.5), protocol=2).replace(b"numpy._core.", b"numpy.core.")
    file = io.BytesIO()
    torch.save({"x": 0}, file, _use_new_zipfile_serialization=False)
    assert b"numpy.core.multiarray" in data
    # The pickle of a legacy file is the pickle of its object: magic number, version, system, object, keys.
    parts = [pickle.dumps(part, protocol=2) for part in (0x1950A86A20F9469CFC6C, 1001, {})]
    assert torch.load(io.BytesIO(b"".join(parts) + data + pickle.dumps([], protocol=2))) == 2.5


def test_a_checkpoint_that_runs_code_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "evil.pt"
    torch.save({"model": {}, "cfg": SimpleNamespace(run=os.getcwd)}, path)
    with pytest.raises(SurfaceFusionError, match=r"types\.SimpleNamespace.*--trust-checkpoint.*TORCH_FORCE"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


@pytest.mark.parametrize("content", [b"", b"text\n", b"PK\x03\x04 truncated", b"\x80\x02}q\x00."])
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes) -> None:
    path = tmp_path / "foreign.pt"
    path.write_bytes(content)
    with pytest.raises(SurfaceFusionError, match=r"foreign\.pt is truncated or not a fairseq checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_a_truncated_checkpoint_is_named(tmp_path: Path) -> None:
    whole = REFERENCE / "checkpoint_best.pt"
    path = tmp_path / "half.pt"
    path.write_bytes(whole.read_bytes()[:400_000])
    with pytest.raises(SurfaceFusionError, match=r"half\.pt is truncated"):
        checkpoint_utils.load_checkpoint_to_cpu(str(path))


def test_a_missing_checkpoint_is_named() -> None:
    with pytest.raises(SurfaceFusionError, match=r"checkpoint nowhere\.pt does not exist"):
        checkpoint_utils.load_checkpoint_to_cpu("nowhere.pt")


def test_a_folder_is_no_checkpoint(tmp_path: Path) -> None:
    with pytest.raises(SurfaceFusionError, match=r"checkpoint .* is a folder; give a file in it"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path))


def test_a_state_dict_alone_is_no_checkpoint(tmp_path: Path) -> None:
    torch.save(torch.nn.Linear(2, 2).state_dict(), tmp_path / "weights.pt")
    with pytest.raises(SurfaceFusionError, match="not a fairseq checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / "weights.pt"))


# -- data ---------------------------------------------------------------------------------------


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


def test_overrides_that_are_no_dictionary() -> None:
    with pytest.raises(SurfaceFusionError, match=r"--model-overrides \[1\] is not a dictionary"):
        checkpoint_utils.load_checkpoint_to_cpu("any.pt", [1])


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


def test_nothing_left_is_an_error() -> None:
    task = FairseqTask(argparse.Namespace())
    with pytest.raises(SurfaceFusionError, match=r"none of the 2 sentence pairs fits .*\(1024, 1024\)"):
        task.filter_indices_by_size(np.arange(2), pairs(3000, 2000), (1024, 1024))


# -- search -------------------------------------------------------------------------------------


def test_data_in_parts(tmp_path: Path) -> None:
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


def test_diverse_beam_takes_sentence_ids() -> None:
    """The ids of a batch decide nothing: rows 0, 1 and ids 70, 90 give the same candidates."""
    generator = torch.Generator().manual_seed(0)
    steps = [torch.rand(2, 2, 9, generator=generator).log_softmax(-1) for _ in range(3)]

    def candidates(ids: torch.Tensor) -> list[torch.Tensor]:
        searcher = search.DiverseBeamSearch(Dictionary(), num_groups=2, diversity_strength=0.5)
        out = list(searcher.step(0, steps[0], None, None, ids))
        scores = torch.zeros(2, 2, 1)
        out += searcher.step(1, steps[1], scores, None, ids)
        out += searcher.step(2, steps[2][1:], scores[1:].repeat(1, 1, 2), None, ids[1:])  # one has ended
        return out

    by_row, by_id = candidates(torch.tensor([0, 1])), candidates(torch.tensor([70, 90]))
    assert all(torch.equal(a, b) for a, b in zip(by_row, by_id, strict=True))


def test_no_ngram_comes_twice() -> None:
    """``--no-repeat-ngram-size 2``: a model that would say one word over and over."""
    model = shaken(SHARED)
    with torch.no_grad():
        model.decoder.output_projection.weight[9] *= 4
    dictionary = build(SHARED)[1].target_dictionary
    net = batch()["net_input"]

    def repeats(**options: int) -> int:
        """Sentences in which two words stand side by side more than once."""
        generator = SequenceGenerator([model], dictionary, beam_size=2, max_len_b=12, min_len=8, **options)
        found = generator.generate([], {"net_input": {k: net[k] for k in ("src_tokens", "src_lengths")}})
        words = [hypotheses[0]["tokens"].tolist() for hypotheses in found]
        pairs = [list(itertools.pairwise(sentence)) for sentence in words]
        return sum(len(set(each)) < len(each) for each in pairs)

    assert repeats() > 0 == repeats(no_repeat_ngram_size=2)


def test_replace_unk_without_a_dictionary(tmp_path: Path) -> None:
    assert utils.load_align_dict("@@ ") == {}
    assert utils.load_align_dict(None) is None
    (tmp_path / "align").write_text("horse cal\n")
    assert utils.load_align_dict(str(tmp_path / "align")) == {"horse": "cal"}


# -- copies ----------------------------------------------------------------------------------------


def test_a_hub_is_copied_whole() -> None:
    model, task = build("--surfacefusion", "att", "--sf-gate", "0.8")
    cfg = {"generation": {"replace_unk": None}, "tokenizer": None, "bpe": None}
    hub = hub_utils.GeneratorHubInterface(OmegaConf.create(cfg), task, [model])
    task.state.add_factory("answer", int)
    copied = copy.deepcopy(hub)
    assert copied.task.state.answer == 0 and "answer" not in task.state.state_dict
    with pytest.raises(AttributeError, match="no factory for attribute question"):
        _ = copied.task.state.question
    assert copied.models[0] is not model
    same = zip(model.parameters(), copied.models[0].parameters(), strict=True)
    assert all(torch.equal(a, b) for a, b in same)


# -- importing twice ----------------------------------------------------------------------------


def copy_of_the_package(folder: Path, user_dir: Path) -> Path:
    return Path(
        shutil.copytree(user_dir, folder / "surface_fusion", ignore=shutil.ignore_patterns("__pycache__"))
    )


def test_the_imported_package_may_be_the_user_dir(user_dir: Path, tmp_path: Path) -> None:
    link = tmp_path / "surface_fusion"
    link.symlink_to(user_dir)
    for path in (user_dir, link):
        utils.import_user_module(argparse.Namespace(user_dir=str(path)))


def test_a_checkout_elsewhere_is_said_and_not_loaded_twice(
    user_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    elsewhere = copy_of_the_package(tmp_path, user_dir)
    with caplog.at_level(logging.WARNING):
        utils.import_user_module(argparse.Namespace(user_dir=str(elsewhere)))
    assert f"--user-dir {elsewhere}" in caplog.text and "is already imported" in caplog.text


def test_another_version_elsewhere_is_refused(user_dir: Path, tmp_path: Path) -> None:
    elsewhere = copy_of_the_package(tmp_path, user_dir)
    (elsewhere / "version.py").write_text('__version__ = "9.9.9"\n')
    with pytest.raises(SurfaceFusionError, match=r"surface-fusion 9\.9\.9, but 0\.1\.0 is already imported"):
        utils.import_user_module(argparse.Namespace(user_dir=str(elsewhere)))


def test_a_plugin_of_somebody_else_is_imported_as_ever(tmp_path: Path) -> None:
    plugin = tmp_path / "a_plugin_of_somebody_else"
    plugin.mkdir()
    (plugin / "__init__.py").touch()
    utils.import_user_module(argparse.Namespace(user_dir=str(plugin)))
    assert plugin.name in sys.modules


# -- noise --------------------------------------------------------------------------------------

WARNING_SOURCES = {
    "hydra\\.experimental": ("hydra", "experimental/initialize.py", "no longer experimental"),
    "broadcast_buffers": ("torch", "nn/parallel/distributed.py", "`broadcast_buffers` is deprecated. Use "),
    "version_base": ("hydra", "version.py", "The version_base parameter is not specified"),
    "strict flag": ("hydra", "compose.py", "The strict flag in the compose API is deprecated"),
    "package header": ("hydra", "core/default_element.py", "Usage of deprecated keyword in package header"),
    "ConfigStore schema": (
        "hydra",
        "_internal/config_loader_impl.py",
        "is validated against ConfigStore schema",
    ),
    "torch\\.cuda\\.amp": ("fairseq", "tasks/fairseq_task.py", "torch.cuda.amp.autocast("),
    "mismatched key_padding_mask": ("torch", "nn/functional.py", "Support for mismatched"),
    "pin_memory": (
        "torch",
        "utils/data/dataloader.py",
        "argument is set as true but no accelerator is found",
    ),
    "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD": ("torch", "serialization.py", "Environment variable TORCH_FORCE"),
}


@pytest.mark.parametrize("message", [message for message, _, _ in warning_filters.HARMLESS_WARNINGS])
def test_the_noise_is_still_made(message: str) -> None:
    (package, file, text) = next(source for key, source in WARNING_SOURCES.items() if key in message)
    folder = Path(next(iter(find_spec(package).submodule_search_locations)))
    # Adjacent string literals make one text.
    source = re.sub(r'"\s*\n\s*f?"', "", (folder / file).read_text())
    assert text in source, f"{package} no longer warns of this: take it out of warning_filters.py"


def test_importing_the_package_says_nothing() -> None:
    done = subprocess.run([sys.executable, "-c", "import surface_fusion"], capture_output=True, text=True)
    ours = [line for line in (done.stdout + done.stderr).splitlines() if "SyntaxWarning" not in line]
    assert (done.returncode, ours) == (0, [])
