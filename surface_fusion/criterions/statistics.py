"""Sum logging outputs over processes while the backward runs.

fairseq sums losses and token counts over processes after the backward and waits for the result before the
optimizer step, which costs 0.4 ms of GPU time per update. They are known after the forward: the packed step
(``packed/step.py``) starts the all-reduce before the backward, and the trainer reads the result later.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

LoggingOutputs = list[dict[str, Any]]


class _Reduction(NamedTuple):
    """A started all-reduce."""

    outputs: LoggingOutputs
    names: list[str]
    """Names of the sums, in order, after those of the extra numbers."""
    wait: Callable[[], Any]
    sums: Tensor
    """Complete after :attr:`wait`, on the CPU."""


class OverlappedStatistics:
    """The sums of one update.

    The trainer calls :meth:`expect` before the update. The criterion then calls :meth:`add` for each batch
    and :meth:`start` before the last backward; both do nothing without :meth:`expect`. The trainer reads the
    result with :meth:`take`.
    """

    def __init__(self) -> None:
        self._extra: list[float] | None = None
        self._group: dist.ProcessGroup | None = None
        self._outputs: LoggingOutputs = []
        self._started: _Reduction | None = None
        self._copy_stream: Any = None

    def expect(self, extra: Sequence[float], group: dist.ProcessGroup | None = None) -> None:
        """Begin an update; *extra* are further numbers to sum over the processes of *group*."""
        self._extra, self._group, self._outputs, self._started = list(extra), group, [], None

    def add(self, output: dict[str, Any]) -> None:
        """Add the logging output of one of the update's batches: numbers, or scalars on any device."""
        if self._extra is not None:
            self._outputs.append(output)

    def start(self, scale: Tensor) -> None:
        """Start the all-reduce of the added outputs; called before the backward of the update's last batch.

        Args:
            scale: factor of that batch's gradient, on the GPU if there is one. It is zero if this process has
                only a dummy batch, whose outputs are then counted as zero.
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
        self._started = _Reduction(outputs, order[extra:], *self._to_host(sums, work))
        self._extra = None

    def _to_host(self, sums: Tensor, work: Any) -> tuple[Callable[[], Any], Tensor]:
        """Start copying *sums* to the host on a side stream; return a function that waits, and the copy."""
        if not sums.is_cuda:
            return work.wait, sums
        self._copy_stream = self._copy_stream or torch.cuda.Stream(sums.device)
        with torch.cuda.stream(self._copy_stream):
            work.wait()
            on_host = torch.empty(sums.shape, dtype=sums.dtype, pin_memory=True)
            on_host.copy_(sums, non_blocking=True)
        sums.record_stream(self._copy_stream)
        copied = torch.cuda.Event()
        copied.record(self._copy_stream)
        return copied.synchronize, on_host

    def take(self, outputs: LoggingOutputs) -> tuple[dict[str, float], list[float]] | None:
        """Return the sums of *outputs* by name, and those of the extra numbers.

        Returns None if no all-reduce was started, or one of other outputs than *outputs*.
        """
        started, self._started = self._started, None
        if started is None or not _same(started.outputs, outputs):
            return None
        started.wait()
        numbers = started.sums.tolist()
        extra = len(numbers) - len(started.names)
        sums = dict(zip(started.names, numbers[extra:], strict=True))
        return {name: sums[name] for name in outputs[0]}, numbers[:extra]


def as_vector(values: Mapping[Any, Any], device: torch.device) -> tuple[list[Any], Tensor]:
    """Collect numbers and scalars into one float64 tensor on *device*, without a synchronisation.

    Returns:
        The names in the tensor's order (values on the host first), and the tensor.
    """
    order = sorted(values, key=lambda name: _is_on_gpu(values[name]))
    on_host = [float(values[name]) for name in order if not _is_on_gpu(values[name])]
    numbers = torch.tensor(on_host, dtype=torch.double, pin_memory=device.type == "cuda")
    on_gpu = [values[name].double().view(1) for name in order[len(on_host) :]]
    return order, torch.cat([numbers.to(device, non_blocking=True), *on_gpu])


def _is_on_gpu(value: Any) -> bool:
    return torch.is_tensor(value) and value.is_cuda


def _same(started: LoggingOutputs, outputs: LoggingOutputs) -> bool:
    """Whether the outputs are unchanged: a task may modify what the criterion returned."""
    return [output.keys() for output in started] == [output.keys() for output in outputs] and all(
        before[name] is after[name] for before, after in zip(started, outputs, strict=True) for name in before
    )
