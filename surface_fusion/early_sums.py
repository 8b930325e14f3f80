"""What several processes log, summed over them while the backward runs.

fairseq sums losses and numbers of tokens over processes behind the backward, and waits for the sums before
the optimizer may begin: 0.4 ms of a GPU's time an update. But all of them are known after the forward. The
fast step (``fast/step.py``) sends them then, and the trainer finds them there.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional

import torch
import torch.distributed as dist
from torch import Tensor

Outputs = list[dict[str, Any]]


class EarlySums:
    """The sums of one update: announced by the trainer, sent by the criterion, taken by the trainer.

    What is not announced is not sent; what was sent for other outputs than the trainer has is not given.
    """

    def __init__(self) -> None:
        self._extra: Optional[list[float]] = None
        self._group: Optional[dist.ProcessGroup] = None
        self._outputs: Outputs = []
        self._sent: Optional[tuple[Outputs, list[str], Callable[[], Any], Tensor]] = None
        self._beside: Any = None

    def announce(self, extra: Sequence[float], group: Optional[dist.ProcessGroup] = None) -> None:
        """An update begins, and its sums will be asked for.

        Args:
            extra: of this process, to be summed along.
            group: of the processes.
        """
        self._extra, self._group, self._outputs, self._sent = list(extra), group, [], None

    def add(self, output: dict[str, Any]) -> None:
        """What was logged of one of the update's batches: numbers, or scalars on any device."""
        if self._extra is not None:
            self._outputs.append(output)

    def send(self, scale: Tensor) -> None:
        """Begin to sum what was added; to be called before the backward of the update's last batch.

        Args:
            scale: the factor of its gradient, on the GPU if there is one. Zero stands for a process without
                a batch of its own, which went through another one and logs nothing.
        """
        if self._extra is None:
            return
        by_name = {name: [output[name] for output in self._outputs] for name in self._outputs[0]}
        totals = {name: sum(values[1:], values[0]) for name, values in by_name.items()}
        order, sums = as_vector({**dict(enumerate(self._extra)), **totals}, scale.device)
        extra = len(self._extra)
        sums[extra:].masked_fill_(scale.eq(0), 0)
        work = dist.all_reduce(sums, group=self._group, async_op=True)
        outputs = [dict(output) for output in self._outputs]
        self._sent = outputs, order[extra:], *self._to_host(sums, work)
        self._extra = None

    def _to_host(self, sums: Tensor, work: Any) -> tuple[Callable[[], Any], Tensor]:
        """A function that waits for *work* on *sums*, and where they are then; no kernel waits for it."""
        if not sums.is_cuda:
            return work.wait, sums
        self._beside = self._beside or torch.cuda.Stream(sums.device)
        with torch.cuda.stream(self._beside):
            work.wait()
            on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            on_host.copy_(sums, non_blocking=True)
        sums.record_stream(self._beside)
        arrived = torch.cuda.Event()
        arrived.record(self._beside)
        return arrived.synchronize, on_host

    def take(self, outputs: Outputs) -> Optional[tuple[dict[str, float], list[float]]]:
        """The sums of *outputs* by name, and of the extra numbers, if it was these that were sent."""
        sent, self._sent = self._sent, None
        if sent is None or not _same(sent[0], outputs):
            return None
        _, order, arrived, sums = sent
        arrived()
        numbers = sums.tolist()
        extra = len(numbers) - len(order)
        found = dict(zip(order, numbers[extra:], strict=True))
        return {name: found[name] for name in outputs[0]}, numbers[:extra]


def as_vector(values: Mapping[Any, Any], device: torch.device) -> tuple[list[Any], Tensor]:
    """Numbers and scalars in one tensor of doubles on *device*, without waiting for it.

    Returns:
        The names in the order of the tensor: those of values on the host first, each kind as it was given.
    """
    order = sorted(values, key=lambda name: _is_on_gpu(values[name]))
    on_host = [float(values[name]) for name in order if not _is_on_gpu(values[name])]
    numbers = torch.tensor(on_host, dtype=torch.double, pin_memory=device.type == "cuda")
    on_gpu = [values[name].double().view(1) for name in order[len(on_host) :]]
    return order, torch.cat([numbers.to(device, non_blocking=True), *on_gpu])


def _is_on_gpu(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_cuda


def _same(sent: Outputs, outputs: Outputs) -> bool:
    """Whether a task has left them as the criterion gave them."""
    return [output.keys() for output in sent] == [output.keys() for output in outputs] and all(
        one[name] is other[name] for one, other in zip(sent, outputs, strict=True) for name in one
    )


def of(trainer: Any) -> Optional[EarlySums]:
    """What the trainer's criterion has of these; None if it does not send."""
    return getattr(trainer.get_criterion(), "early_sums", None)
