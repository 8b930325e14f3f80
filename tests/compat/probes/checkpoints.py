"""Faults in loading and saving checkpoints, and in resuming from them."""

import argparse
import contextlib
import inspect
import io
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from fairseq import checkpoint_utils
from fairseq.data import Dictionary, LanguagePairDataset
from fairseq.dataclass.configs import CheckpointConfig
from fairseq.file_io import PathManager
from fairseq.optim import FairseqOptimizer
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from fairseq_cli import train

from tests.compat.probes.expect import error_of, fails, replaced
from tests.helpers.full_disk import files_of_at_most


def checkpoint(**parts: Any) -> dict[str, Any]:
    """A checkpoint of one parameter of 1,000 ones, with *parts* added to it."""
    history = [{"num_updates": 1, "optimizer_name": "", "lr_scheduler_state": {}}]
    extra = {"train_iterator": {"epoch": 1}, **parts.pop("extra_state", {})}
    return {"model": {"w": torch.ones(1000)}, "optimizer_history": history, "extra_state": extra, **parts}


def finished_training_goes_on() -> bool:
    """By its code: ``--max-update`` is read after an update only."""
    code = inspect.getsource(train.main) + inspect.getsource(train.train)
    return "max_update" not in code.replace("max_update=cfg.optimization.max_update", "")


def namespace_is_refused() -> bool:
    file = io.BytesIO()
    torch.save({"args": argparse.Namespace(lr=1)}, file)
    file.seek(0)
    return fails(torch.load, file)


def foreign_checkpoint_is_not_named() -> bool:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        file.write(b"no checkpoint")
        file.flush()
        return file.name not in str(error_of(checkpoint_utils.load_checkpoint_to_cpu, file.name))


def published_checkpoint_is_plain() -> bool:
    args = argparse.Namespace(arch="transformer", sf_fuision_mode="hard")
    return checkpoint_utils._upgrade_state_dict(checkpoint(args=args))["cfg"].model.arch == "transformer"


def misspelt_override_is_ignored() -> bool:
    with tempfile.NamedTemporaryFile(suffix=".pt") as file:
        torch.save(checkpoint(cfg={"model": {"dropout": 0.1}}), file.name)
        return not fails(checkpoint_utils.load_checkpoint_to_cpu, file.name, {"droput": 0.2})


def _loads_flipped_bit(load: Callable[[str], Any], **parts: Any) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "a.pt")
        torch.save(checkpoint(**parts), path)
        content = bytearray(path.read_bytes())
        content[content.index(torch.ones(1000).numpy().tobytes()) + 402] ^= 1
        path.write_bytes(content)
        return not bool(load(str(path))["model"]["w"].eq(1).all())


def flipped_bit_is_loaded() -> bool:
    return _loads_flipped_bit(checkpoint_utils.load_checkpoint_to_cpu)


def flipped_bit_is_loaded_as_ema() -> bool:
    ema = {"extra_state": {"ema": {"w": torch.ones(1000)}}, "model": {}}
    return _loads_flipped_bit(checkpoint_utils.load_ema_from_checkpoint, **ema)


def damaged_last_checkpoint_is_fatal() -> bool:
    given = argparse.Namespace(load_checkpoint_on_all_dp_ranks=True)
    trainer = argparse.Namespace(data_parallel_world_size=1, cfg=argparse.Namespace(checkpoint=given))
    with tempfile.TemporaryDirectory() as folder:
        torch.save(checkpoint(), Path(folder, "checkpoint1.pt"))
        last = Path(folder, "checkpoint_last.pt")
        last.write_bytes(Path(folder, "checkpoint1.pt").read_bytes()[:2000])
        return fails(Trainer.load_checkpoint, trainer, str(last), error=RuntimeError)


def failed_save_leaves_file() -> bool:
    no_pause = replaced(checkpoint_utils, "time", argparse.Namespace(sleep=lambda seconds: None))
    with tempfile.TemporaryDirectory() as folder, no_pause:
        with files_of_at_most(1000), contextlib.suppress(Exception):
            checkpoint_utils.torch_persistent_save(torch.zeros(1000), str(Path(folder, "a.pt")))
        return any(Path(folder).iterdir())


def copy_is_in_place() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        new, last = Path(folder, "new.pt"), Path(folder, "last.pt")
        new.write_bytes(bytes(2000))
        last.write_bytes(bytes(1500))
        with files_of_at_most(1000), contextlib.suppress(OSError):
            PathManager.copy(str(new), str(last), overwrite=True)
        return len(last.read_bytes()) != 1500


def _saved(value: float, end_of_epoch: bool, **flags: Any) -> set[str]:
    """Names of the files that a save at update 20 writes after a best value of 1."""
    names: set[str] = set()
    trainer = argparse.Namespace(data_parallel_rank=0, should_save_checkpoint_on_current_rank=True)
    vars(trainer).update(checkpoint_suffix="", task=None, get_num_updates=lambda: 20)
    vars(trainer).update(
        consolidate_optimizer=lambda: None, save_checkpoint=lambda name, state: names.add(name)
    )
    epoch = argparse.Namespace(epoch=1, end_of_epoch=lambda: end_of_epoch, state_dict=dict)
    cfg = CheckpointConfig(no_last_checkpoints=True, no_epoch_checkpoints=True, **flags)
    checkpoint_utils.save_checkpoint.best = 1.0
    with tempfile.TemporaryDirectory() as folder:
        cfg.save_dir = folder
        Path(folder, "checkpoint.best_loss_1.0000.pt").touch()
        checkpoint_utils.save_checkpoint(cfg, trainer, epoch, value)
    del checkpoint_utils.save_checkpoint.best
    return {Path(name).name for name in names}


def second_best_is_not_kept() -> bool:
    return not _saved(2.0, True, keep_best_checkpoints=2)


def update_that_ends_epoch_is_not_saved() -> bool:
    return bool(_saved(2.0, False, save_interval_updates=5)) and not _saved(
        2.0, True, save_interval_updates=5
    )


def dummy_file_is_removed() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "dummy").touch()
        checkpoint_utils.verify_checkpoint_directory(folder)
        return not Path(folder, "dummy").exists()


def _start(extra_state: Any) -> list[tuple[Any, ...]]:
    """Arguments of each ``Trainer.lr_step`` when a training starts from a checkpoint with *extra_state*."""
    cfg = argparse.Namespace(restore_file="a.pt", finetune_from_model=None, optimizer_overrides="{}")
    cfg.reset_optimizer = cfg.reset_lr_scheduler = cfg.reset_meters = cfg.reset_dataloader = False
    trainer, steps = argparse.Namespace(checkpoint_suffix="", task=None), []
    trainer.load_checkpoint = lambda *args, **kwargs: extra_state
    iterator = argparse.Namespace(epoch=2, load_state_dict=lambda state: None)
    trainer.get_train_iterator = lambda **kwargs: iterator
    trainer.lr_step = lambda *args: steps.append(args)
    checkpoint_utils.load_checkpoint(cfg, trainer)
    return steps


def lack_of_space_is_noticed_late() -> bool:
    with files_of_at_most(1):
        return _start(None) == [(2,)]


def resume_drops_validation_loss() -> bool:
    return _start({"train_iterator": {"epoch": 2, "iterations_in_epoch": 0}, "val_loss": 1.5}) == [(2,)]


def reset_is_not_advised() -> bool:
    one, two = (torch.optim.SGD([torch.ones(1)] * count, lr=1.0) for count in (1, 2))
    optimizer = argparse.Namespace(optimizer=one)
    return "--reset" not in str(error_of(FairseqOptimizer.load_state_dict, optimizer, two.state_dict()))


def plateau_saves_no_bad_epochs() -> bool:
    schedule = argparse.Namespace(lr_scheduler=argparse.Namespace(best=1.0, last_epoch=2, num_bad_epochs=1))
    return "num_bad_epochs" not in ReduceLROnPlateauLRSchedule.state_dict(schedule)


def plateau_loads_no_bad_epochs() -> bool:
    schedule = argparse.Namespace(lr_scheduler=argparse.Namespace(best=1.0, last_epoch=2, num_bad_epochs=0))
    ReduceLROnPlateauLRSchedule.load_state_dict(schedule, {"best": 1.0, "num_bad_epochs": 1})
    return schedule.lr_scheduler.num_bad_epochs == 0


def _iterator(**options: Any) -> Any:
    """Batches of four of 40 sentence pairs."""
    words, sizes = Dictionary(), np.full(40, 5)
    rows = [torch.full((5,), words.eos())] * 40
    data = LanguagePairDataset(rows, sizes, words, rows, sizes, words)
    return FairseqTask(argparse.Namespace()).get_batch_iterator(data, max_sentences=4, **options)


def resume_makes_other_batches() -> bool:
    first, second = ([list(batch) for batch in _iterator(epoch=epoch).frozen_batches] for epoch in (1, 2))
    return first != second


def number_of_processes_is_not_saved() -> bool:
    states = []
    for processes in (1, 2):
        iterator = _iterator(num_shards=processes)
        next(iterator.next_epoch_itr())
        states.append(iterator.state_dict())
    return states[0] == states[1]


def fewer_processes_repeat_sentences() -> bool:
    """After six of the ten batches."""
    iterator = _iterator()
    iterator.load_state_dict({"epoch": 1, "iterations_in_epoch": 3, "shuffle": True, "num_shards": 2})
    return iterator.iterations_in_epoch == 3


def best_value_outlives_training() -> bool:
    trainer = argparse.Namespace(data_parallel_rank=1)
    for best in (1.0, 2.0):
        cfg = argparse.Namespace(maximize_best_checkpoint_metric=False, no_save=True, save_dir=str(best))
        checkpoint_utils.save_checkpoint(cfg, trainer, None, best)
    return checkpoint_utils.save_checkpoint.best == 1
