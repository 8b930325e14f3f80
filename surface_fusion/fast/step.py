"""The forward and backward of a training step on packed rows, in CUDA graphs where there is a GPU.

The gradient does not travel through the model's own modules: backward adds it to the flat buffer, from where
``--optimizer flat_adam`` reduces it over processes and takes it. Distributed wrappers are passed by.

A graph is a recording of all kernels of one shape, launched at once: fairseq's step takes 60 ms on
the host however small the batch. Batches go into the smallest recorded :class:`Capacity` that wastes little.
"""

import logging
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from fairseq.distributed.utils import get_data_parallel_group
from torch import Tensor

from surface_fusion.fast.capture import capture
from surface_fusion.fast.compile_ahead import Compilation
from surface_fusion.fast.forward import Encoded, PackedTransformer
from surface_fusion.fast.forward_ahead import ForwardAhead
from surface_fusion.fast.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
from surface_fusion.fast.packed import Capacity, PackedBatch, capacity_for, pack, pack_static
from surface_fusion.while_waiting import gpu_has_work

logger = logging.getLogger(__name__)

RECORDING_ROWS = 35_000
"""What making a recording costs, in units of :attr:`Capacity.cost` (H200: 1.4 million a second): 0.04 s, as
the GPU works on a batch meanwhile, and somewhat less, as batches go on to need it."""

TOGETHER = 16
"""Several processes, which wait for each other, make theirs in the same batch of so many."""


class Backward(NamedTuple):
    """What adds the gradients to the flat buffer, in this order."""

    decoder: Callable[[Tensor], None]
    """Its own, and that of the output embedding, times a scalar."""
    encoder: Callable[[], None]
    """Its own, times the same."""


Forward = tuple[LinearCrossEntropy, Backward]
"""Losses, and what is to follow."""


class PackedStep:
    """Loss of a batch, whose backward adds the gradients of all parameters to the flat buffer.

    Args:
        packed: the model.
        smoothing: label smoothing epsilon.
        ignore_prefix_size: target tokens at the start of each sentence that are not learnt.
        compilation: of the kernels, if it has begun.
    """

    def __init__(
        self,
        packed: PackedTransformer,
        smoothing: float,
        ignore_prefix_size: int,
        compilation: Compilation | None = None,
    ) -> None:
        self.packed = packed
        self.smoothing = smoothing
        self.compilation = compilation
        self.ignore_prefix_size = ignore_prefix_size
        self.padding_idx = packed.decoder.padding_idx
        self._trigger = torch.zeros((), requires_grad=True)
        self._graphs = Graphs(self) if packed.flat.data.is_cuda else None
        self._ahead: ForwardAhead[Forward] = ForwardAhead(packed.flat)
        self._behind_encoder = packed.flat.behind(packed.encoder.parameters())

    def losses(self, batch: PackedBatch, encoded: Encoded) -> LinearCrossEntropy:
        """The losses of a packed batch, summed."""
        features = self.packed.decode(batch, encoded)
        weight = batch.target.ne(self.padding_idx)
        if self.ignore_prefix_size > 0:
            weight = weight & batch.tgt.positions.ge(self.ignore_prefix_size)
        return linear_cross_entropy(
            features.rows,
            self.packed.output_embedding,
            batch.target,
            weight.float(),
            smoothing=self.smoothing,
            gate=features.gate,
        )

    def evaluate(self, sample: dict[str, Any]) -> LinearCrossEntropy:
        """Losses without dropout and gradients."""
        self.packed.training = False
        with torch.no_grad():
            batch = pack(*_tokens(sample), self.padding_idx)
            losses = self.losses(batch, self.packed.encode(batch.src))
        gpu_has_work()
        return losses

    def begin(self, sample: dict[str, Any], seed: int) -> bool:
        """On a GPU, launch the forward of a batch for the :meth:`train` to come, seeded with *seed*.

        Returns:
            Whether that was done: not where it would take a recording, which waits until the batch has come,
            nor where those begun before were of no use.
        """
        graphs = self._graphs
        if graphs is None or not self._ahead.pays or not graphs.hold(sample):
            return False
        self._ahead.begin(_tokens(sample), seed, lambda: graphs.run(sample))
        return True

    def train(
        self,
        sample: dict[str, Any],
        last: bool = True,
        before_last: Callable[[Tensor], None] | None = None,
    ) -> LinearCrossEntropy:
        """Losses of a sample as fairseq collates it; ``loss.backward()`` leads to the flat buffer.

        Args:
            last: of an update's batches, as far as is known: then its backward also averages the gradient
                over processes, the decoder's while the encoder's is computed, and measures its norm, all
                without waiting for the device.
            before_last: called before such a backward, with the gradient's factor.
        """
        self.packed.training = True
        if self._graphs is not None:
            losses, backward = self._ahead.take(_tokens(sample)) or self._graphs.run(sample)
            self._graphs.record_pending()
        else:
            losses, backward = self.forward(pack(*_tokens(sample), self.padding_idx))
        gpu_has_work()

        def run(scale: Tensor) -> None:
            if last and before_last is not None:
                before_last(scale)
            flat, averaged = self.packed.flat, last and dist.is_initialized()
            backward.decoder(scale)
            if averaged:
                flat.begin_average(self._behind_encoder, get_data_parallel_group())
            backward.encoder()
            if averaged:
                flat.average_early(get_data_parallel_group())
            if last:
                flat.begin_norm()

        loss = _WithBackward.apply(self._trigger, losses.loss, run)
        return losses._replace(loss=loss)

    def forward(self, batch: PackedBatch) -> Forward:
        """The losses, and what adds the gradients to the flat buffer."""
        with torch.enable_grad():
            encoded, ends = self.packed.encode(batch.src).apart()
            losses = self.losses(batch, encoded)
        held = [losses.loss]  # let go of all activations after the backward
        passed_on: list[tuple[Tensor, Tensor]] = []

        def decoder(scale: Tensor) -> None:
            with torch.enable_grad():
                scaled = held.pop() * scale  # given to grad(), it would have torch import sympy: a second
            leaves = self.packed.leaves
            found = torch.autograd.grad(scaled, [*leaves, *(end for _, end in ends)], allow_unused=True)
            self._add(found[: len(leaves)])
            read = zip(ends, found[len(leaves) :], strict=True)
            passed_on.extend((out, gradient) for (out, _), gradient in read if gradient is not None)
            ends.clear()

        def encoder() -> None:
            outs, gradients = zip(*passed_on, strict=True)
            passed_on.clear()
            self._add(torch.autograd.grad(outs, self.packed.leaves, gradients, allow_unused=True))
            self.packed.flat.local_only = True

        return LinearCrossEntropy(*(x.detach() for x in losses)), Backward(decoder, encoder)

    def _add(self, found: Sequence[Tensor | None]) -> None:
        pairs = [(g, f) for g, f in zip(self.packed.gradients, found, strict=True) if f is not None]
        torch._foreach_add_([g for g, _ in pairs], [f for _, f in pairs])


class _WithBackward(torch.autograd.Function):
    """A loss whose backward is a function of ours."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, loss: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        ctx.run = backward
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.run(scale)
        return None, None, None


def _tokens(sample: dict[str, Any]) -> tuple[Tensor, Tensor, Tensor]:
    inputs = sample["net_input"]
    return inputs["src_tokens"], inputs["prev_output_tokens"], sample["target"]


def _needed(sample: dict[str, Any]) -> Capacity:
    src_tokens, _, target = _tokens(sample)
    sentences, src_width = src_tokens.shape
    return capacity_for(sentences, src_width, target.shape[1], int(sample["ntokens"]))


class Recording:
    """Forward and backward of one capacity as CUDA graphs, with the tensors that they read and write."""

    def __init__(self, step: PackedStep, capacity: Capacity, stream: Any, pool: Any) -> None:
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
        """Put *sample* where the graphs read it."""
        parts = _tokens(sample)
        for static, part in zip(self.tokens, parts, strict=True):
            static[part.numel() :].fill_(self.padding_idx)
            static[: part.numel()].copy_(part.flatten())
        (sentences, src_width), tgt_width = parts[0].shape, parts[1].shape[1]
        self.shape.copy_(torch.tensor([sentences, src_width, tgt_width]), non_blocking=True)

    def rehearse(self) -> None:
        """Run once without recording: kernels are compiled and libraries loaded; gradients get zero added."""
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
            backward.decoder(self.scale)
            backward.encoder()
        torch.cuda.current_stream().wait_stream(self._stream)

    def record(self) -> None:
        """Make the graphs."""
        where = self._stream, self._pool
        self._forward_graph, (self._losses, backward) = capture(self._forward, *where)
        self._decoder_graph, _ = capture(lambda: backward.decoder(self.scale), *where)
        self._encoder_graph, _ = capture(backward.encoder, *where)

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
        return losses, Backward(self._decoder, self._encoder)

    def _decoder(self, scale: Tensor) -> None:
        self.scale.copy_(scale)
        self._decoder_graph.replay()

    def _encoder(self) -> None:
        self._encoder_graph.replay()
        self._step.packed.flat.local_only = True


class Graphs:
    """The recordings made so far, which share their memory: one runs at a time.

    A batch takes the cheapest that holds it. Another is made where none does, or when what batches were
    too small for theirs has added up to the price of one: then while the GPU works on a batch's forward.
    """

    def __init__(self, step: PackedStep) -> None:
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
        """Whether one of the recordings holds the batch."""
        return bool(self._holding(_needed(sample)))

    def record_pending(self) -> None:
        """Make the recording that has paid off, if one has; the device has work meanwhile."""
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
