"""Captured CUDA graphs of a training step, for the batch shapes that occur.

A captured graph launches all kernels of one shape at once; fairseq's step takes 60 ms on the host even for a
small batch. A batch runs in the cheapest captured :class:`Capacity` that holds it.
"""

import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor

from surface_fusion.ops.cuda_graph import capture
from surface_fusion.ops.linear_cross_entropy import LinearCrossEntropy
from surface_fusion.packed.batch import Capacity, capacity_for, pack_static
from surface_fusion.packed.kernel_warmup import Compilation

if TYPE_CHECKING:
    from surface_fusion.packed.step import PackedStep

logger = logging.getLogger(__name__)

RECORDING_ROWS = 35_000
"""Cost of a capture, in units of :attr:`Capacity.cost` (H200: 1.4 million a second): 0.04 s, as
the GPU works on a batch meanwhile, and slightly less, as later batches will need it too."""

TOGETHER = 16
"""Several processes, which wait for each other, make theirs in the same batch of so many."""


Forward = tuple[LinearCrossEntropy, Callable[[Tensor], None]]
"""Losses, and a function that adds the gradients, times its argument, to the flat buffer."""


def tokens_of(sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    """Source, shifted target and target of a batch: B x S, B x T, B x T."""
    inputs = sample["net_input"]
    return inputs["src_tokens"], inputs["prev_output_tokens"], sample["target"]


def _needed(sample: dict[str, Any]) -> Capacity:
    src_tokens, _, target = tokens_of(sample)
    sentences, src_width = src_tokens.shape
    return capacity_for(sentences, src_width, target.shape[1], int(sample["ntokens"]))


class Recording:
    """Captured forward and backward of one capacity, with the tensors that they read and write."""

    def __init__(self, step: "PackedStep", capacity: Capacity, stream: Any, pool: Any) -> None:
        self.capacity = capacity
        device = step.packed.flat.data.device
        self.padding_idx = step.padding_idx
        tokens = torch.full((3, capacity.padded), step.padding_idx, device=device)
        self.tokens = tokens.unbind()
        self.shape = torch.ones(3, dtype=torch.int64, device=device)
        self.scale = torch.zeros((), device=device)
        self._stream, self._pool = stream, pool
        self._step = step

    def load(self, sample: dict[str, Any]) -> None:
        """Copy *sample* to the input tensors of the graphs."""
        parts = tokens_of(sample)
        for static, part in zip(self.tokens, parts, strict=True):
            static[part.numel() :].fill_(self.padding_idx)
            static[: part.numel()].copy_(part.flatten())
        (sentences, src_width), tgt_width = parts[0].shape, parts[1].shape[1]
        self.shape.copy_(torch.tensor([sentences, src_width, tgt_width]), non_blocking=True)

    def rehearse(self) -> None:
        """Warm up: run once without capture to compile kernels and load libraries; adds zero gradients."""
        device = self.scale.device
        data = self._step.packed.flat.data
        compilation = self._step.compilation or Compilation(
            self._step.packed, self._step.smoothing, data.dtype, data.device
        )
        compilation.wait()
        self.scale.zero_()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.random.fork_rng([device]):
            _, backward = self._forward()
            backward(self.scale)
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self) -> None:
        """Capture the graphs."""
        where = self._stream, self._pool
        self._forward_graph, (self._losses, backward) = capture(self._forward, *where)
        self._backward_graph, _ = capture(lambda: backward(self.scale), *where)

    def _forward(self) -> Forward:
        src_tokens, prev_output_tokens, target = self.tokens
        batch = pack_static(
            src_tokens, prev_output_tokens, target, self.shape, self.capacity, self.padding_idx
        )
        return self._step.forward(batch)

    def run(self, sample: dict[str, Any]) -> Forward:
        """As :meth:`PackedStep.forward`."""
        self.load(sample)
        self._forward_graph.replay()
        losses = LinearCrossEntropy(*(x.clone() for x in self._losses))
        return losses, self._backward

    def _backward(self, scale: Tensor) -> None:
        self.scale.copy_(scale)
        self._backward_graph.replay()
        self._step.packed.flat.local_only = True


class Graphs:
    """The captured graphs, which share their memory pool: one runs at a time.

    A batch uses the cheapest graph that holds it. A new one is captured if none does, or if the accumulated
    cost of batches that were smaller than their graph exceeds the cost of a capture; in the latter case while
    the GPU is busy with a batch's forward.
    """

    def __init__(self, step: "PackedStep") -> None:
        self._step = step
        self._recordings: list[Recording] = []
        self._wasted = 0
        self._pending: Capacity | None = None
        self._batches = 0
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, sample: dict[str, Any]) -> Forward:
        """As :meth:`PackedStep.forward`."""
        return self._recording_for(_needed(sample), sample).run(sample)

    def hold(self, sample: dict[str, Any]) -> bool:
        """Whether a captured graph holds the batch."""
        return bool(self._holding(_needed(sample)))

    def record_pending(self) -> None:
        """Capture the graph whose cost is now justified, if there is one, while the device is busy."""
        self._batches += 1
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if self._pending is not None and (alone or self._batches % TOGETHER == 0):
            self._record(self._pending)
            self._pending = None

    def _recording_for(self, needed: Capacity, sample: dict[str, Any]) -> Recording:
        best = min(self._holding(needed), key=lambda r: r.capacity.cost, default=None)
        if best is None:
            return self._record(needed, sample)
        self._wasted += best.capacity.cost - needed.cost
        if self._pending is None and self._wasted >= RECORDING_ROWS and best.capacity.cost > needed.cost:
            self._pending = needed
        return best

    def _holding(self, needed: Capacity) -> list[Recording]:
        return [r for r in self._recordings if r.capacity.holds(needed)]

    def _record(self, capacity: Capacity, sample: dict[str, Any] | None = None) -> Recording:
        self._wasted = 0
        recording = Recording(self._step, capacity, self._stream, self._pool)
        if sample is not None and not self._recordings:
            recording.load(sample)
            recording.rehearse()
        recording.record()
        self._recordings.append(recording)
        logger.debug(f"recorded {capacity}, the {len(self._recordings)}th")
        return recording
