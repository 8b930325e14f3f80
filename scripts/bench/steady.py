"""The steady state of a training step: fairseq's trainer takes the same few batches over and over."""

import gc
import itertools
import logging
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from fairseq import options, tasks
from fairseq.data import FairseqDataset
from fairseq.data.iterators import BufferedIterator, CountingIterator, GroupedIterator
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

BATCHES = 6
"""Different ones, drawn from all."""


def be_quiet() -> None:
    """No log of the trainings, which is much and the same each time."""
    logging.getLogger("fairseq").setLevel(logging.ERROR)
    logging.getLogger("surface_fusion").setLevel(logging.WARNING)


def training_data(task: Any) -> FairseqDataset:
    """The real one, for :func:`build`."""
    task.load_dataset("train")
    dataset: FairseqDataset = task.dataset("train")
    return dataset


def build(
    flags: Sequence[str], max_tokens: int, dataset_of: Callable[[Any], FairseqDataset]
) -> tuple[Trainer, list[Any]]:
    """fairseq's trainer as the command line *flags* builds it, and batches of ``dataset_of(task)``."""
    args = options.parse_args_and_arch(options.get_training_parser(), list(flags))
    args.tpu = False  # fairseq takes --bf16 for a TPU
    cfg = convert_namespace_to_omegaconf(args)
    torch.manual_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    batches = task.get_batch_iterator(
        dataset_of(task), max_tokens=max_tokens, required_batch_size_multiple=8, seed=1
    ).next_epoch_itr(shuffle=True)
    return trainer, list(itertools.islice(batches, BATCHES))


def again_and_again(batches: Sequence[Any], passes: int) -> Iterator[list[Any]]:
    """What each update of so many *passes* over *batches* gets, from the buffer of fairseq's trainings.

    There the plugin finds an update's batch before its turn.
    """
    buffered: Any = BufferedIterator(len(batches), list(batches) * passes)
    buffered.fast_training = True  # as that of a training; other trainers do not ask
    return iter(GroupedIterator(CountingIterator(buffered), 1))


def rates(trainer: Trainer, batches: Sequence[Any], warm_up: int, passes: int, cpu: bool) -> list[float]:
    """Target tokens a second in each of *passes* over *batches*, after *warm_up* others.

    Raises:
        torch.OutOfMemoryError: they do not fit.
    """
    tokens = sum(int(batch["ntokens"]) for batch in batches)
    updates = again_and_again(batches, warm_up + passes)
    found = []
    for i in range(warm_up + passes):
        start = time.perf_counter()
        for samples in itertools.islice(updates, len(batches)):
            trainer.train_step(samples, raise_oom=True)
        if not cpu:
            torch.cuda.synchronize()
        if i >= warm_up:
            found.append(tokens / (time.perf_counter() - start))
    return found


def forget(cpu: bool) -> None:
    """Give back the memory of a trainer that nobody holds any more, before the next is measured."""
    gc.collect()
    if not cpu:
        torch.cuda.empty_cache()
