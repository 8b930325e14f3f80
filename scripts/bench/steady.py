"""Measure the steady state of training: a trainer repeats updates on the same few batches.

The trainer is that of ``fairseq-train``: a ``SurfaceFusionTrainer`` for a SurfaceFusion model without
``--sf-plain``, otherwise fairseq's own.
"""

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

from surface_fusion.training.trainer import SurfaceFusionTrainer

BATCHES = 6
"""Number of batches, drawn at random."""


def silence_logs() -> None:
    """Show only errors of fairseq, and warnings of this package."""
    logging.getLogger("fairseq").setLevel(logging.ERROR)
    logging.getLogger("surface_fusion").setLevel(logging.WARNING)


def training_data(task: Any) -> FairseqDataset:
    """Load the training set, for :func:`build_trainer`."""
    task.load_dataset("train")
    dataset: FairseqDataset = task.dataset("train")
    return dataset


def build_trainer(
    flags: Sequence[str], max_tokens: int, dataset_of: Callable[[Any], FairseqDataset]
) -> tuple[Trainer, list[Any]]:
    """Build the trainer of the command line *flags*, and batches of ``dataset_of(task)``."""
    args = options.parse_args_and_arch(options.get_training_parser(), list(flags))
    args.tpu = False  # fairseq sets it with --bf16
    cfg = convert_namespace_to_omegaconf(args)
    torch.manual_seed(cfg.common.seed)
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    batches = task.get_batch_iterator(
        dataset_of(task), max_tokens=max_tokens, required_batch_size_multiple=8, seed=1
    ).next_epoch_itr(shuffle=True)
    return trainer, list(itertools.islice(batches, BATCHES))


def repeated(trainer: Trainer, batches: Sequence[Any], passes: int) -> Iterator[list[Any]]:
    """Yield the batch of each update in *passes* over *batches*, from a data buffer as in a training."""
    buffer = BufferedIterator(len(batches), list(batches) * passes)
    if isinstance(trainer, SurfaceFusionTrainer):
        trainer._buffer = buffer  # begin_epoch sets it in a training; forward prefetch reads it
    return iter(GroupedIterator(CountingIterator(buffer), 1))


def tokens_per_second(
    trainer: Trainer, batches: Sequence[Any], warm_up: int, passes: int, cpu: bool
) -> list[float]:
    """Measure target tokens per second in each of *passes* over *batches*, after *warm_up* passes.

    Raises:
        torch.OutOfMemoryError: a batch does not fit into the memory.
    """
    tokens = sum(int(batch["ntokens"]) for batch in batches)
    updates = repeated(trainer, batches, warm_up + passes)
    speeds = []
    for i in range(warm_up + passes):
        start = time.perf_counter()
        for samples in itertools.islice(updates, len(batches)):
            trainer.train_step(samples, raise_oom=True)
        if not cpu:
            torch.cuda.synchronize()
        if i >= warm_up:
            speeds.append(tokens / (time.perf_counter() - start))
    return speeds


def free_memory(cpu: bool) -> None:
    """Free the memory of trainers that are no longer referenced."""
    gc.collect()
    if not cpu:
        torch.cuda.empty_cache()
