"""CUDA graphs of forward and backward of a training step, captured for the batch shapes that occur.

Replaying a graph launches all its kernels at once; fairseq's step takes 60 ms on the host even for a small
batch. A graph has a static shape, a :class:`Capacity`. A batch runs in the cheapest captured graph whose
capacity covers it.
"""

import logging
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from surface_fusion.ops.cuda_graph import capture
from surface_fusion.ops.linear_cross_entropy import LinearCrossEntropy
from surface_fusion.packed.batch import (
    Capacity,
    ForwardResult,
    PackedBatch,
    capacity_for,
    pack_static,
    tokens_of,
)
from surface_fusion.packed.flat_parameters import FlatParameters

logger = logging.getLogger(__name__)

CAPTURE_COST = 35_000
"""Cost of a capture, in units of :attr:`Capacity.cost` (an H200 computes 1.4 million of them a second). The
measured 0.04 s are 56,000; less is charged because the GPU computes meanwhile and later batches benefit too.
"""

CAPTURE_INTERVAL = 16
"""With several processes, which wait for each other, all capture pending graphs at every 16th batch only."""


def _capacity_of(sample: dict[str, Any]) -> Capacity:
    src_tokens, _, target = tokens_of(sample)
    return capacity_for(len(target), src_tokens.shape[1], target.shape[1], int(sample["ntokens"]))


class CapturedStep:
    """The graphs of forward and backward for one capacity, and their input tensors.

    Args:
        forward: computes the losses of a packed batch and returns its backward.
        flat: the parameters and their gradients.
        padding_idx: the padding token.
        capacity: the static shape.
        stream: a side stream to capture on.
        pool: the memory pool that all graphs share.
    """

    def __init__(
        self,
        forward: Callable[[PackedBatch], ForwardResult],
        flat: FlatParameters,
        padding_idx: int,
        capacity: Capacity,
        stream: Any,
        pool: Any,
    ) -> None:
        self.capacity = capacity
        device = flat.data.device
        self._forward, self._flat, self._padding_idx = forward, flat, padding_idx
        self._tokens = torch.full((3, capacity.padded), padding_idx, device=device).unbind()
        self._shape = torch.ones(3, dtype=torch.int64, device=device)
        self._scale = torch.zeros((), device=device)
        self._stream, self._pool = stream, pool

    def load(self, sample: dict[str, Any]) -> None:
        """Copy *sample* to the graphs' input tensors."""
        tokens = tokens_of(sample)
        for static, matrix in zip(self._tokens, tokens, strict=True):
            static[matrix.numel() :].fill_(self._padding_idx)
            static[: matrix.numel()].copy_(matrix.flatten())
        shape = torch.tensor([*tokens[0].shape, tokens[1].shape[1]])
        self._shape.copy_(shape, non_blocking=True)

    def warm_up(self) -> None:
        """Run once without capture, to compile kernels and load libraries; adds zero to the gradients."""
        self._scale.zero_()
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream), torch.random.fork_rng([self._scale.device]):
            self._run_forward().backward(self._scale)
        torch.cuda.current_stream().wait_stream(self._stream)

    def capture(self) -> None:
        """Capture the graphs."""
        side = self._stream, self._pool
        self._forward_graph, (self._losses, backward) = capture(self._run_forward, *side)
        self._backward_graph, _ = capture(lambda: backward(self._scale), *side)

    def _run_forward(self) -> ForwardResult:
        src_tokens, prev_output_tokens, target = self._tokens
        return self._forward(
            pack_static(src_tokens, prev_output_tokens, target, self._shape, self.capacity, self._padding_idx)
        )

    def run(self, sample: dict[str, Any]) -> ForwardResult:
        """Replay the forward of *sample*; the returned backward replays the backward."""
        self.load(sample)
        self._forward_graph.replay()
        return ForwardResult(LinearCrossEntropy(*(x.clone() for x in self._losses)), self._run_backward)

    def _run_backward(self, scale: Tensor) -> None:
        self._scale.copy_(scale)
        self._backward_graph.replay()
        self._flat.needs_average = True


class GraphCache:
    """The captured graphs of a training. They share their memory, so one runs at a time.

    A graph is captured if none covers a batch, or if the accumulated cost of batches that were smaller than
    their graph exceeds the cost of a capture. The arguments are those of :class:`CapturedStep`.
    """

    def __init__(
        self, forward: Callable[[PackedBatch], ForwardResult], flat: FlatParameters, padding_idx: int
    ) -> None:
        self._step = forward, flat, padding_idx
        self._captured: list[CapturedStep] = []
        self._excess_cost = 0
        self._pending: Capacity | None = None
        self._batches = 0
        self._stream = torch.cuda.Stream()
        self._pool = torch.cuda.graph_pool_handle()

    def run(self, sample: dict[str, Any]) -> ForwardResult:
        """Run the forward of *sample* in the cheapest graph; captures one if none covers it."""
        return self._select(_capacity_of(sample), sample).run(sample)

    def covers(self, sample: dict[str, Any]) -> bool:
        """Whether a captured graph covers *sample*."""
        return bool(self._covering(_capacity_of(sample)))

    def capture_pending(self) -> None:
        """Capture the graph that has become worth its cost, if any; call it while the GPU computes."""
        self._batches += 1
        alone = not dist.is_initialized() or dist.get_world_size() == 1
        if self._pending is not None and (alone or self._batches % CAPTURE_INTERVAL == 0):
            self._capture(self._pending)
            self._pending = None

    def _select(self, needed: Capacity, sample: dict[str, Any]) -> CapturedStep:
        cheapest = min(self._covering(needed), key=lambda step: step.capacity.cost, default=None)
        if cheapest is None:
            return self._capture(needed, sample)
        excess = cheapest.capacity.cost - needed.cost
        self._excess_cost += excess
        if self._pending is None and self._excess_cost >= CAPTURE_COST and excess > 0:
            self._pending = needed
        return cheapest

    def _covering(self, needed: Capacity) -> list[CapturedStep]:
        return [step for step in self._captured if step.capacity.covers(needed)]

    def _capture(self, capacity: Capacity, sample: dict[str, Any] | None = None) -> CapturedStep:
        """Capture a graph; the first one after a warm-up with *sample*."""
        self._excess_cost = 0
        step = CapturedStep(*self._step, capacity, self._stream, self._pool)
        if sample is not None and not self._captured:
            step.load(sample)
            step.warm_up()
        step.capture()
        self._captured.append(step)
        logger.debug(f"captured CUDA graph {len(self._captured)}, for {capacity}")
        return step
