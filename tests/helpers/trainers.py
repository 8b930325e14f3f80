"""Real trainers on a CPU, as ``fairseq-train`` builds them from flags."""

from pathlib import Path
from typing import Any

import torch
from fairseq import options, tasks
from fairseq.data.iterators import GroupedIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from tests.helpers.small_training import TRAIN
from tests.helpers.tiny import USER_DIR

PACKED = ("--criterion", "fused_label_smoothed_cross_entropy", "--optimizer", "flat_adam")
"""Flags of a training without padding."""


def build_trainer(data: Path, *flags: object, train: tuple[object, ...] = TRAIN) -> Any:
    """The trainer of ``fairseq-train DATA TRAIN FLAGS``, with its data loaded."""
    # fairseq would start one process for each GPU.
    argv = [data, *train, "--user-dir", USER_DIR, "--distributed-world-size", 1, *flags]
    args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, argv)))
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    for split in ("train", "valid"):
        task.load_dataset(split)
    torch.manual_seed(1)
    return Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))


def batches_of(trainer: Any, epoch: int = 1) -> Any:
    """Start an epoch as ``fairseq_cli.train`` does; yields what ``train_step`` takes."""
    iterator = trainer.get_train_iterator(epoch).next_epoch_itr()
    grouped = GroupedIterator(iterator, trainer.cfg.optimization.update_freq[0])
    trainer.begin_epoch(epoch)
    return grouped
