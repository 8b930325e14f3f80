"""What fairseq's trainer spends on each update beside the update.

With a fast step that matters: of 3.7 ms of Python an update (base model, one core of an EPYC), 1.6 went
into looking up 50 settings by way of omegaconf, and 0.9 into seeding torch's generators by way of
torch.compile's wrapper. With several GPUs, what is logged was summed over them in two operations that the
host waited for, and then read from the GPU one by one; and the check that all have the same gradient cost
another three waits. Nothing that is computed changes.
"""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
from omegaconf import DictConfig, OmegaConf
from torch import Tensor


class ReadOnceConfig(DictConfig):
    """A configuration that looks each value up once, and again after it was set."""

    def __getattr__(self, key: str) -> Any:
        value = super().__getattr__(key)
        if not key.startswith("_"):
            self.__dict__[key] = value
        return value

    def __setattr__(self, key: str, value: Any) -> None:
        self.__dict__.pop(key, None)
        super().__setattr__(key, value)

    def __setitem__(self, key: Any, value: Any) -> None:
        self.__dict__.pop(key, None)
        super().__setitem__(key, value)


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
    """fairseq's ``Trainer.__init__``; from then on its configuration answers quickly.

    A criterion that has something to prepare for the model begins before.
    """
    if hasattr(criterion, "prepare"):
        criterion.prepare(model, cfg)
    init(trainer, cfg, task, model, criterion, *args, **kwargs)
    given = [name for name in trainer.cfg if not OmegaConf.is_missing(trainer.cfg, name)]
    for section in (trainer.cfg, *(trainer.cfg[name] for name in given)):
        if type(section) is DictConfig:
            object.__setattr__(section, "__class__", ReadOnceConfig)


def set_seed(set_seed: Callable[[Any], None], trainer: Any) -> None:
    """fairseq's ``Trainer._set_seed``: one seed for each update, so that a resumed training is the same."""
    if trainer.tpu:
        return set_seed(trainer)
    seed = trainer.cfg.common.seed + trainer.get_num_updates()
    torch.default_generator.manual_seed(seed)
    if trainer.cuda:
        torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)
    return None


def sum_over_processes(
    all_reduce_dict: Callable[..., dict[str, Any]], data: Mapping[str, Any], device: Any, group: Any
) -> dict[str, Any]:
    """fairseq's ``all_reduce_dict`` of scalars on a GPU, in one operation and one wait; sums on the CPU."""
    values = {name: torch.as_tensor(value) for name, value in data.items()}
    if device.type != "cuda" or not all(value.numel() == 1 for value in values.values()):
        return all_reduce_dict(data, device, group)
    order = sorted(values, key=lambda name: values[name].is_cuda)
    on_host = [float(value) for value in values.values() if not value.is_cuda]
    parts = [torch.tensor(on_host, dtype=torch.double, pin_memory=True).to(device, non_blocking=True)]
    parts += [value.double().view(1) for value in values.values() if value.is_cuda]
    sums = torch.cat(parts)
    dist.all_reduce(sums, group=group)
    found = dict(zip(order, sums.cpu().unbind(), strict=True))
    return {name: found[name].view(values[name].shape) for name in data}


def compare_norms_later(check: Callable[..., None], trainer: Any, grad_norm: Tensor) -> None:
    """fairseq's ``Trainer._check_grad_norms`` on GPUs without waiting for them: of the update before.

    Raises:
        FloatingPointError: the processes' gradients differed.
    """
    norms = trainer._grad_norm_buf
    if norms is None or not norms.is_cuda or trainer.cfg.common.amp:
        return check(trainer, grad_norm)
    if not hasattr(trainer, "norms_on_host"):
        trainer.norms_on_host = torch.full(norms.shape, float(grad_norm), dtype=norms.dtype, pin_memory=True)
        trainer.norms_sent = torch.cuda.Event()
    trainer.norms_sent.synchronize()
    found = trainer.norms_on_host.tolist()
    if not all(abs(norm - found[0]) < 1e-6 * (found[0] + 1e-6) for norm in found):
        raise FloatingPointError(
            f"the gradient's norms of the update before differ between processes: {found}; are the GPUs "
            "of one kind? --ddp-backend legacy_ddp, or adam instead of flat_adam, may help"
        )
    norms.zero_()
    norms[trainer.data_parallel_rank].fill_(float(grad_norm))
    dist.all_reduce(norms, group=trainer.data_parallel_process_group)
    trainer.norms_on_host.copy_(norms, non_blocking=True)
    trainer.norms_sent.record()
    return None
