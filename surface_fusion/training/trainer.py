"""Reduce the overhead of fairseq's trainer per update, without changing results.

* Read settings once: of 3.7 ms of Python per update (base model, one core of an EPYC), 1.6 ms were 50 lookups
  through omegaconf.
* Seed torch's generators directly: torch.compile's wrapper took 0.9 ms per update.
* Sum logging outputs over GPUs in one operation: fairseq uses two, waits for both, and then copies the values
  to the host one by one.
* Compare gradient norms one update later, within that sum: fairseq's check costs another operation and three
  synchronisations.
* Keep data workers from epoch to epoch instead of restarting them.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from omegaconf import DictConfig, OmegaConf
from torch import Tensor

from surface_fusion.compat.patching import replaced
from surface_fusion.criterions import statistics

_TRAIN_STEP, _OPTIMIZER_STEP = FairseqTask.train_step, FairseqTask.optimizer_step


class ReadOnceConfig(DictConfig):
    """A configuration that caches each value after the first lookup, until it is set or removed.

    Interpolations, which refer to other values, are not cached.
    """

    def __getattr__(self, key: str) -> Any:
        value = super().__getattr__(key)
        if not key.startswith("_") and not OmegaConf.is_interpolation(self, key):
            self.__dict__[key] = value
        return value

    def __setattr__(self, key: str, value: Any) -> None:
        self.__dict__.pop(key, None)
        super().__setattr__(key, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.pop(key, None)
        super().__setitem__(key, value)

    def __delattr__(self, key: str) -> None:
        self.__dict__.pop(key, None)
        super().__delattr__(key)

    def __delitem__(self, key: Any) -> None:
        self.__dict__.pop(key, None)
        super().__delitem__(key)

    def pop(self, key: Any, *default: Any) -> Any:
        """Remove and return a value, as omegaconf does."""
        self.__dict__.pop(key, None)
        return super().pop(key, *default)


def build_quickly(
    init: Callable[..., None],
    trainer: Any,
    cfg: Any,
    task: Any,
    model: Any,
    criterion: Any,
    *args: Any,
    **kwargs: Any,
) -> None:
    """fairseq's ``Trainer.__init__``; also calls the criterion's ``prepare`` and caches settings."""
    if hasattr(criterion, "prepare"):
        criterion.prepare(model, cfg)
    init(trainer, cfg, task, model, criterion, *args, **kwargs)
    _read_once(getattr(task, "cfg", None))
    given = [name for name in trainer.cfg if not OmegaConf.is_missing(trainer.cfg, name)]
    for section in (trainer.cfg, *(trainer.cfg[name] for name in given)):
        _read_once(section)


def build_quick_schedule(build_optimizer: Callable[[Any], None], trainer: Any) -> None:
    """fairseq's ``Trainer._build_optimizer``; also caches the settings of the learning-rate scheduler.

    The scheduler has its own copy of them and looks up three per update.
    """
    build_optimizer(trainer)
    _read_once(getattr(trainer._lr_scheduler, "cfg", None))


def _read_once(section: Any) -> None:
    if type(section) is DictConfig:
        object.__setattr__(section, "__class__", ReadOnceConfig)


def set_seed(set_seed: Callable[[Any], None], trainer: Any) -> None:
    """fairseq's ``Trainer._set_seed``: set a seed that depends on the update, so resuming is exact."""
    if trainer.tpu:
        return set_seed(trainer)
    seed = seed_of_update(trainer, trainer.get_num_updates())
    torch.default_generator.manual_seed(seed)
    if trainer.cuda:
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    return None


def is_fairseqs_loop(trainer: Any) -> bool:
    """Whether *trainer* runs fairseq's own training loop.

    Detects methods that a subclass, or a single trainer or task, overrides, but not patches of fairseq's
    classes.
    """
    steps = [getattr(trainer.task, name, None) for name in ("train_step", "optimizer_step")]
    known = [getattr(step, "__func__", None) for step in steps] == [_TRAIN_STEP, _OPTIMIZER_STEP]
    replaced = any(callable(getattr(Trainer, name, None)) for name in vars(trainer))
    return type(trainer) is Trainer and known and not replaced and not trainer.is_fsdp


def seed_of_update(trainer: Any, num_updates: int) -> int:
    """fairseq's seed for the update after *num_updates*."""
    return int(trainer.cfg.common.seed + num_updates)


def sum_over_processes(
    all_reduce_dict: Callable[..., dict[str, Any]], data: Mapping[str, Any], device: Any, group: Any
) -> dict[str, Any]:
    """fairseq's ``all_reduce_dict`` of GPU scalars, with one operation and one synchronisation.

    The sums are on the CPU.
    """
    values = {name: torch.as_tensor(value) for name, value in data.items()}
    if device.type != "cuda" or not all(value.numel() == 1 for value in values.values()):
        return all_reduce_dict(data, device, group)
    order, sums = statistics.as_vector(values, device)
    dist.all_reduce(sums, group=group)
    found = dict(zip(order, sums.cpu().unbind(), strict=True))
    return {name: found[name].view(values[name].shape) for name in data}


def sum_at_once(
    sync: Callable[..., tuple[Any, list[Any]]], trainer: Any, *outputs: Any, **how: Any
) -> tuple[Any, list[Any]]:
    """fairseq's ``Trainer._fast_stat_sync_sum``, using :func:`sum_over_processes`."""
    summed = functools.partial(sum_over_processes, distributed_utils.all_reduce_dict)
    with replaced(distributed_utils, "all_reduce_dict", summed):
        return sync(trainer, *outputs, **how)


def announce_sums(
    train_step: Callable[..., Any], trainer: Any, samples: Any, *args: Any, **kwargs: Any
) -> Any:
    """fairseq's ``Trainer.train_step``; lets the criterion sum statistics early."""
    early = statistics.of(trainer)
    if early is not None and trainer._sync_stats():
        extra = [trainer._local_cumulative_training_time(), *_norm_slots(trainer)]
        early.announce(extra, trainer.data_parallel_process_group)
    return train_step(trainer, samples, *args, **kwargs)


def send_norm_along(
    sync: Callable[..., tuple[Any, list[Any]]],
    trainer: Any,
    logging_outputs: list[Any],
    *extra: Any,
    **how: Any,
) -> tuple[Any, list[Any]]:
    """fairseq's ``Trainer._fast_stat_sync_sum``; on GPUs also gathers the processes' gradient norms.

    These are the norms of the previous update, or -1 if it had none; :func:`compare_norms_later` compares
    them. Sums that the criterion sent early are used instead of summing again.
    """
    if not trainer.model.training:
        return sync(trainer, logging_outputs, *extra, **how)
    slots = _norm_slots(trainer)
    vars(trainer).pop("norm_before", None)
    early = statistics.of(trainer)
    found = None if early is None else early.take(logging_outputs)
    if found is not None:
        output, (train_time, *norms) = found
        _, ooms, _ = extra
        outputs, sums = [output], [output["sample_size"], ooms, train_time]
    elif not slots:
        return sync(trainer, logging_outputs, *extra, **how)
    else:
        outputs, tensors = sync(trainer, logging_outputs, *extra, *slots, **how)
        numbers = [float(value) for value in tensors]  # the trainer handles them faster than tensors
        sums, norms = numbers[: len(extra)], numbers[len(extra) :]
    if slots:
        trainer.norms_before = norms
    return outputs, sums


def _norm_slots(trainer: Any) -> list[float]:
    """A vector with this process's previous norm at its rank; empty if fairseq compares the norms itself."""
    norms = trainer._grad_norm_buf
    if norms is None or not norms.is_cuda or trainer.cfg.common.amp:
        return []
    slots = [0.0] * len(norms)
    slots[trainer.data_parallel_rank] = getattr(trainer, "norm_before", -1.0)
    return slots


def compare_norms_later(check: Callable[..., None], trainer: Any, grad_norm: Tensor) -> None:
    """fairseq's ``Trainer._check_grad_norms``, for the norms of the previous update if they were gathered.

    Raises:
        FloatingPointError: the processes' gradient norms differ.
    """
    found = vars(trainer).pop("norms_before", None)
    if found is None:
        return check(trainer, grad_norm)
    if not all(abs(norm - found[0]) <= 1e-6 * abs(found[0]) + 1e-12 for norm in found):
        raise FloatingPointError(
            f"the gradient's norms of the update before differ between processes: {found}; are the GPUs "
            "of one kind? --ddp-backend legacy_ddp, or adam instead of flat_adam, may help"
        )
    trainer.norm_before = float(grad_norm)
    return None


def keep_data_workers(get_train_iterator: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """fairseq's ``Trainer.get_train_iterator``; a new epoch's iterator reuses the data workers.

    With ``--grouped-shuffling`` fairseq builds new batches for each epoch and restarts all data workers: with
    eight of them 0.7 s per epoch, while the GPUs wait.
    """
    before: Any = getattr(trainer, "train_iterator", None)
    iterator = trainer.train_iterator = get_train_iterator(trainer, *args, **kwargs)
    if (
        getattr(before, "dataloader", None) is not None
        and before is not iterator
        and before.dataset is iterator.dataset
        and iterator.reuse_dataloader
        and iterator.dataloader is None
        and trainer.task.can_reuse_epoch_itr(iterator.dataset)  # no data depends on the epoch
    ):
        iterator.dataloader = before.dataloader
        sampler = iterator.epoch_batch_sampler = before.epoch_batch_sampler
        sampler.ordered_batches = iterator.ordered_batches
        # Set as for a new iterator: the previous one may be of a curriculum or a resumed epoch.
        sampler.shuffle = iterator.next_epoch_idx > trainer.cfg.dataset.curriculum
        sampler.fix_batches_to_gpus = trainer.cfg.distributed_training.fix_batches_to_gpus
    return iterator
