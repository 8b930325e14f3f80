"""Run in a process of its own, without surface-fusion: which of fairseq's troubles are still there?

Prints one JSON object, trouble -> true while ``surface_fusion/compat`` has to repair it.
"""

import argparse
import contextlib
import copy
import inspect
import io
import json
import os
import sys
import tarfile
import tempfile
from pathlib import Path

import numpy as np
import torch
from fairseq import checkpoint_utils, file_utils, models, search, tasks, utils
from fairseq.data import ConcatDataset, Dictionary, FastaDataset, LanguagePairDataset, data_utils
from fairseq.data.audio.data_cfg import get_config_from_yaml
from fairseq.data.indexed_dataset import MMapIndexedDatasetBuilder
from fairseq.distributed import utils as distributed_utils
from fairseq.file_chunker_utils import Chunker, find_offsets
from fairseq.file_io import PathManager
from fairseq.hub_utils import GeneratorHubInterface
from fairseq.models import distributed_fairseq_model
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationConfig
from fairseq_cli import generate, interactive
from omegaconf import OmegaConf

from tests.helpers.full_disk import files_of_at_most


def fails(function, *args, error=Exception, **kwargs) -> bool:
    """Whether the call raises *error*, and nothing else."""
    try:
        function(*args, **kwargs)
    except error:
        return True
    return False


def namespace_refused() -> bool:
    file = io.BytesIO()
    torch.save({"args": argparse.Namespace(lr=1)}, file)
    file.seek(0)
    return fails(torch.load, file)


def last_batch_lost() -> bool:
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
    rows = [torch.full((n,), words.eos()) for n in sizes]
    data = LanguagePairDataset(rows, sizes, words)
    task = FairseqTask(argparse.Namespace())
    return fails(task.filter_indices_by_size, np.arange(2), data, 10)


def data_in_parts_needs_a_flag() -> bool:
    part = argparse.Namespace(sizes=np.arange(3))
    parts = ConcatDataset.__new__(ConcatDataset)
    parts.datasets, parts.sample_ratios = [part, part], [TranslationConfig().upsample_primary, 1]
    return fails(lambda: parts.sizes, error=ValueError)


def ngrams_are_repeated() -> bool:
    words, lprobs = [2, 5, 6, 5], torch.zeros(1, 9)
    NGramRepeatBlock(2)(torch.tensor([[*words, 1, 1, 1]]), lprobs, bsz=1, beam_size=1, step=3)
    return bool(lprobs[0, 6] == 0)


def diverse_beam_fails() -> bool:
    words = Dictionary()
    step = search.DiverseBeamSearch(words, num_groups=2, diversity_strength=0.5)
    lprobs = torch.rand(2, 2, 9).log_softmax(-1)
    ids = torch.tensor([70, 90])
    step.step(0, lprobs, None, None, ids)
    return fails(step.step, 1, lprobs, torch.zeros(2, 2, 1), None, ids, error=IndexError)


def replace_unk_needs_a_file() -> bool:
    return fails(utils.load_align_dict, "@@ ", error=FileNotFoundError)


def task_cannot_be_copied() -> bool:
    return fails(copy.deepcopy, FairseqTask(argparse.Namespace()), error=RecursionError)


def second_copy_refused() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        for place in ("a", "b"):
            package = Path(folder, place, "some_plugin")
            package.mkdir(parents=True)
            (package / "__init__.py").touch()
        utils.import_user_module(argparse.Namespace(user_dir=f"{folder}/a/some_plugin"))
        other = argparse.Namespace(user_dir=f"{folder}/b/some_plugin")
        return fails(utils.import_user_module, other, error=ImportError)


def foreign_checkpoint_unexplained() -> bool:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        file.write(b"no checkpoint")
        file.flush()
        try:
            checkpoint_utils.load_checkpoint_to_cpu(file.name)
        except Exception as error:
            return file.name not in str(error)
    return False


def missing_folder_unexplained() -> bool:
    task = argparse.Namespace(_name="translation", data="/nowhere/at all", source_lang="en", target_lang="ro")
    try:
        tasks.setup_task(task)
    except Exception as error:
        return "does not exist" not in str(error)
    return False


def resume_makes_other_batches() -> bool:
    words = Dictionary()
    sizes = np.full(40, 5)
    rows = [torch.full((5,), words.eos())] * 40

    def batches(epoch: int) -> list[list[int]]:
        data = LanguagePairDataset(rows, sizes, words, rows, sizes, words)
        task = FairseqTask(argparse.Namespace())
        iterator = task.get_batch_iterator(data, max_sentences=4, epoch=epoch)
        return [list(batch) for batch in iterator.frozen_batches]

    return batches(1) != batches(2)


def carriage_return_ends_a_line() -> bool:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"a \r b\nc\n")
        file.flush()
        (*_, end) = find_offsets(file.name, 1)
        with Chunker(file.name, 0, end) as lines:
            return len(list(lines)) == 3


def carriage_return_ends_a_typed_line() -> bool:
    with tempfile.NamedTemporaryFile() as file:
        file.write(b"a \r b\nc\n")
        file.flush()
        return len(list(interactive.buffered_read(file.name, 1))) == 3


def shards_are_ignored() -> bool:
    return "dataset.num_shards" not in inspect.getsource(generate)


class _Hub:
    """fairseq's hub, whose translation of a line is the line."""

    def __init__(self, max_tokens: int) -> None:
        self.words, self.device, self.models, self.max_positions = Dictionary(), "cpu", [], 10
        self.cfg = OmegaConf.create(
            {"generation": {}, "dataset": {"max_tokens": max_tokens, "batch_size": None}}
        )
        self.task = FairseqTask(argparse.Namespace())
        self.task.build_generator = lambda *args, **kwargs: None
        self.task.build_dataset_for_inference = lambda rows, sizes: LanguagePairDataset(
            rows, sizes, self.words
        )
        self.task.inference_step = lambda generator, models, batch: batch["net_input"]["src_lengths"].tolist()

    def _build_batches(self, *args):
        return GeneratorHubInterface._build_batches(self, *args)

    def lengths(self, *lengths: int) -> list[int]:
        rows = [torch.full((n,), self.words.eos()) for n in lengths]
        return GeneratorHubInterface.generate(self, rows, skip_invalid_size_inputs=True)


def hub_loses_a_long_line() -> bool:
    return _Hub(max_tokens=100).lengths(3, 50, 4) == [3, 4]


def hub_is_limited_by_the_training() -> bool:
    return fails(_Hub(max_tokens=5).lengths, 3, 8)


def texts_are_evaluated() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder, "marker")
        with contextlib.suppress(Exception):
            utils.eval_str_list(f"[__import__('pathlib').Path({str(marker)!r}).touch()]")
        return marker.exists()


def files_name_any_model() -> bool:
    """``fconv``, which then evaluates its layers."""
    words = Dictionary()
    task = argparse.Namespace(source_dictionary=words, target_dictionary=words)
    task.build_model = lambda cfg: models.build_model(cfg, task)
    with tempfile.TemporaryDirectory() as folder:
        marker = Path(folder, "marker")
        layers = f"__import__('pathlib').Path({str(marker)!r}).touch()"
        model = {"_name": "fconv", "dropout": 0.1, "max_source_positions": 8, "encoder_layers": layers}
        state = {"cfg": OmegaConf.create({"model": model}), "model": {}}
        with contextlib.suppress(Exception):
            checkpoint_utils.load_model_ensemble_and_task([__file__], task=task, state=state)
        return marker.exists()


def files_read_the_environment() -> bool:
    history = {"optimizer_history": [{"num_updates": 1, "optimizer_name": "", "lr_scheduler_state": {}}]}
    extra = {"extra_state": {"train_iterator": {}}}
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save({"cfg": {"note": "${oc.env:PATH}"}, "model": {}, **history, **extra}, file.name)
        return checkpoint_utils.load_checkpoint_to_cpu(file.name)["cfg"].note == os.environ["PATH"]


def fasta_names_reach_a_shell() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        with contextlib.suppress(Exception):
            FastaDataset(f"{folder}/train;touch {folder}/marker;")
        return Path(folder, "marker").exists()


def yaml_names_code() -> bool:
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        file.write("a: !!python/name:os.system\n")
        file.flush()
        return get_config_from_yaml(Path(file.name))["a"] is os.system


def archives_write_anywhere() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "model.tar.gz")
        with tarfile.open(path, "w:gz") as archive:
            archive.addfile(tarfile.TarInfo("model/dict.txt"))
            archive.addfile(tarfile.TarInfo(f"{folder}/outside"))
        with contextlib.suppress(Exception):
            file_utils.load_archive_file(str(path))
        return Path(folder, "outside").exists()


def flipped_bit_is_loaded() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.pt")
        torch.save({"model": {"w": torch.ones(1000)}, "optimizer_history": [{}], "extra_state": {}}, path)
        content = bytearray(path.read_bytes())
        content[content.index(torch.ones(1000).numpy().tobytes()) + 402] ^= 1
        path.write_bytes(content)
        with path.open("rb") as file:  # as load_checkpoint_to_cpu does
            return not bool(torch.load(file)["model"]["w"].eq(1).all())


def copy_in_place() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        new, last = Path(folder, "new.pt"), Path(folder, "last.pt")
        new.write_bytes(bytes(2000))
        last.write_bytes(bytes(1500))
        with files_of_at_most(1000), contextlib.suppress(OSError):
            PathManager.copy(str(new), str(last), overwrite=True)
        return len(last.read_bytes()) != 1500


def failed_save_leaves_a_file() -> bool:
    checkpoint_utils.time = argparse.Namespace(sleep=lambda seconds: None)
    checkpoint_utils.logger.setLevel("CRITICAL")
    with tempfile.TemporaryDirectory() as folder:
        with files_of_at_most(1000), contextlib.suppress(Exception):
            checkpoint_utils.torch_persistent_save(torch.zeros(1000), str(Path(folder, "a.pt")))
        return any(Path(folder).iterdir())


def dummy_file_is_removed() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "dummy").touch()
        checkpoint_utils.verify_checkpoint_directory(folder)
        return not Path(folder, "dummy").exists()


def plateau_forgets_bad_epochs() -> bool:
    schedule = argparse.Namespace(lr_scheduler=argparse.Namespace(best=1.0, last_epoch=2, num_bad_epochs=1))
    return "num_bad_epochs" not in ReduceLROnPlateauLRSchedule.state_dict(schedule)


@contextlib.contextmanager
def replaced(owner: object, name: str, value: object):
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def without_gpus():
    return replaced(torch.cuda, "device_count", lambda: 0)


def processes_without_gpus_are_not_started() -> bool:
    """Neither trained nor refused."""
    started: list[int] = []
    given = argparse.Namespace(distributed_init_method="tcp://localhost:9", distributed_no_spawn=False)
    given.distributed_world_size, given.distributed_rank = 2, 0
    spawn = replaced(torch.multiprocessing, "spawn", lambda fn, args, nprocs, join: started.append(nprocs))
    with without_gpus(), spawn:
        distributed_utils.call_main(argparse.Namespace(distributed_training=given), print)
    return started == [0]


def torchrun_needs_gpus() -> bool:
    place = {"MASTER_ADDR": "localhost", "MASTER_PORT": "9", "WORLD_SIZE": "2", "RANK": "1"}
    given = argparse.Namespace(distributed_init_method=None, tpu=False, pipeline_model_parallel=False)
    given.distributed_world_size = 2
    with replaced(os, "environ", {**os.environ, **place}), without_gpus():
        return fails(distributed_utils.infer_init_method, given, error=ZeroDivisionError)


def ddp_gets_a_device_on_the_cpu() -> bool:
    found: list[object] = []

    def ddp(device_ids: object, **kwargs: object) -> None:
        found.append(device_ids)
        raise InterruptedError

    names = ("broadcast_buffers", "bucket_cap_mb", "find_unused_parameters", "gradient_as_bucket_view")
    args = argparse.Namespace(tpu=False, ddp_backend="pytorch_ddp", device_id=0, ddp_comm_hook="none")
    vars(args).update(dict.fromkeys(names, False))
    model, device = torch.nn.Linear(1, 1), torch.device("cpu")
    with replaced(distributed_fairseq_model, "DistributedDataParallel", ddp):
        make = distributed_fairseq_model.DistributedFairseqModel
        fails(make, args, model, None, device, error=InterruptedError)
    return found == [[0]]


def processes_wait_for_half_an_hour() -> bool:
    """As long as torch does by itself, whatever ``--heartbeat-timeout`` says."""
    given = argparse.Namespace(distributed_backend="gloo", distributed_init_method="tcp://localhost:9")
    given.distributed_world_size, given.distributed_rank, given.heartbeat_timeout = 2, 0, 30
    cfg = OmegaConf.create({"common": {"tpu": False}, "distributed_training": vars(given)})
    found: list[object] = []

    def init_process_group(**kwargs: object) -> None:
        found.append(kwargs.get("timeout"))
        raise InterruptedError

    with replaced(torch.distributed, "init_process_group", init_process_group):
        fails(distributed_utils.distributed_init, cfg, error=InterruptedError)
    return found == [None]


def best_value_stays_in_the_process() -> bool:
    trainer = argparse.Namespace(data_parallel_rank=1)
    for best in (1.0, 2.0):
        cfg = argparse.Namespace(maximize_best_checkpoint_metric=False, no_save=True, save_dir=str(best))
        checkpoint_utils.save_checkpoint(cfg, trainer, None, best)
    return checkpoint_utils.save_checkpoint.best == 1


def removed_data_is_read_on() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        builder = MMapIndexedDatasetBuilder(f"{folder}/train.bin", dtype=np.int32)
        builder.add_item(torch.tensor([5, 6, 2]))
        builder.finalize(f"{folder}/train.idx")
        data = data_utils.load_indexed_dataset(f"{folder}/train")
        for path in Path(folder).iterdir():
            path.unlink()
        return data[0].tolist() == [5, 6, 2]


if __name__ == "__main__":
    assert "surface_fusion" not in sys.modules
    troubles = [
        namespace_refused,
        last_batch_lost,
        overlong_sentence_is_fatal,
        data_in_parts_needs_a_flag,
        diverse_beam_fails,
        ngrams_are_repeated,
        replace_unk_needs_a_file,
        task_cannot_be_copied,
        second_copy_refused,
        foreign_checkpoint_unexplained,
        missing_folder_unexplained,
        resume_makes_other_batches,
        carriage_return_ends_a_line,
        carriage_return_ends_a_typed_line,
        shards_are_ignored,
        hub_loses_a_long_line,
        hub_is_limited_by_the_training,
        texts_are_evaluated,
        files_name_any_model,
        files_read_the_environment,
        fasta_names_reach_a_shell,
        yaml_names_code,
        archives_write_anywhere,
        flipped_bit_is_loaded,
        copy_in_place,
        failed_save_leaves_a_file,
        dummy_file_is_removed,
        plateau_forgets_bad_epochs,
        processes_without_gpus_are_not_started,
        torchrun_needs_gpus,
        ddp_gets_a_device_on_the_cpu,
        processes_wait_for_half_an_hour,
        best_value_stays_in_the_process,
        removed_data_is_read_on,
    ]
    print(json.dumps({trouble.__name__: trouble() for trouble in troubles}))
