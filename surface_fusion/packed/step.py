"""Forward and backward of a training step on packed rows, in captured CUDA graphs on a GPU.

Backward adds the gradient directly to the flat buffer, without the model's modules and distributed wrappers.
``--optimizer flat_adam`` reduces the buffer over processes and uses it.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from fairseq.distributed.utils import get_data_parallel_group
from torch import Tensor

from surface_fusion.modules.fused_loss import fused_losses
from surface_fusion.ops.linear_cross_entropy import LinearCrossEntropy, linear_cross_entropy
from surface_fusion.packed.batch import ForwardResult, PackedBatch, pack, tokens_of
from surface_fusion.packed.cuda_graphs import GraphCache
from surface_fusion.packed.forward_prefetch import ForwardPrefetch
from surface_fusion.packed.literal_padding import in_target
from surface_fusion.packed.transformer import PackedTransformer


class PackedStep:
    """Loss of a batch, whose backward adds the gradients of all parameters to the flat buffer.

    Args:
        packed: the model.
        smoothing: label smoothing epsilon.
        ignore_prefix_size: target tokens at the start of each sentence that are not learnt.
    """

    def __init__(self, packed: PackedTransformer, smoothing: float, ignore_prefix_size: int) -> None:
        self.packed = packed
        self.smoothing = smoothing
        self.ignore_prefix_size = ignore_prefix_size
        self.padding_idx = packed.decoder.padding_idx
        self._trigger = torch.zeros((), requires_grad=True)
        self._graphs: GraphCache | None = None
        if packed.flat.data.is_cuda:
            self._graphs = GraphCache(self.forward, packed.flat, self.padding_idx)
        self._prefetch: ForwardPrefetch[ForwardResult] = ForwardPrefetch(packed.flat)

    def losses(self, batch: PackedBatch) -> LinearCrossEntropy:
        """The losses of a packed batch, summed."""
        features = self.packed.decode(batch, self.packed.encode(batch.src))
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
            if in_target(sample, self.padding_idx):
                return self._by_modules(sample)
            batch = pack(*tokens_of(sample), self.padding_idx)
            losses = self.losses(batch)
        return losses

    def can_prefetch(self, sample: dict[str, Any]) -> bool:
        """Whether :meth:`prefetch` supports a batch, which may still be on the CPU.

        It needs a GPU and a captured graph, and stops after several results that were not used.
        """
        if self._graphs is None or not self._prefetch.useful or not self._graphs.covers(sample):
            return False
        return not in_target(sample, self.padding_idx)

    def prefetch(self, sample: dict[str, Any], seed: int) -> None:
        """Launch the forward of the batch of the next :meth:`train`, seeded with *seed*."""
        graphs = self._graphs
        assert graphs is not None
        self._prefetch.launch(tokens_of(sample), seed, lambda: graphs.run(sample))

    def train(
        self,
        sample: dict[str, Any],
        last_of_update: bool = True,
        before_last_backward: Callable[[Tensor], None] | None = None,
    ) -> LinearCrossEntropy:
        """Losses of a sample as fairseq collates it; ``loss.backward()`` adds to the flat gradient.

        Args:
            last_of_update: whether this is the last batch of the update. Its backward also averages the
                gradient over processes and computes its norm, without waiting for the device.
            before_last_backward: called before such a backward, with the gradient's factor.
        """
        self.packed.training = True
        if in_target(sample, self.padding_idx):
            losses, backward = self._forward_by_modules(sample)
        elif self._graphs is not None:
            losses, backward = self._prefetch.take(tokens_of(sample)) or self._graphs.run(sample)
        else:
            losses, backward = self.forward(pack(*tokens_of(sample), self.padding_idx))
        if self._graphs is not None:
            self._graphs.capture_pending()

        def run(scale: Tensor) -> None:
            if last_of_update and before_last_backward is not None:
                before_last_backward(scale)
            backward(scale)
            if last_of_update:
                if dist.is_initialized():
                    self.packed.flat.launch_average(get_data_parallel_group())
                self.packed.flat.launch_norm()

        loss = _WithBackward.apply(self._trigger, losses.loss, run)
        return losses._replace(loss=loss)

    def forward(self, batch: PackedBatch) -> ForwardResult:
        """Compute the losses of a packed batch."""
        with torch.enable_grad():
            losses = self.losses(batch)
        return self._with_gradients(losses, self.packed.leaves, self.packed.gradients)

    def _by_modules(self, sample: dict[str, Any]) -> LinearCrossEntropy:
        """The losses of a padded batch."""
        net, decoder = sample["net_input"], self.packed.decoder
        encoder_out = self.packed.encoder(net["src_tokens"], net["src_lengths"])
        features = decoder(net["prev_output_tokens"], encoder_out, features_only=True)[0]
        prefix = self.ignore_prefix_size
        return fused_losses(decoder, features, sample, smoothing=self.smoothing, ignore_prefix_size=prefix)

    def _forward_by_modules(self, sample: dict[str, Any]) -> ForwardResult:
        """:meth:`forward` of a batch that packed rows cannot express; processes communicate alike in both."""
        with torch.enable_grad():
            losses = self._by_modules(sample)
        flat = self.packed.flat
        params = list(flat.offsets)
        return self._with_gradients(losses, params, [flat.view(param, flat.grad) for param in params])

    def _with_gradients(
        self, losses: LinearCrossEntropy, leaves: Sequence[Tensor], gradients: Sequence[Tensor]
    ) -> ForwardResult:
        graph = [losses.loss]  # backward pops it, so that all activations are freed

        def backward(scale: Tensor) -> None:
            with torch.enable_grad():
                # Given to grad() as grad_outputs, scale would make torch import sympy, which takes a second.
                scaled = graph.pop() * scale
            computed = torch.autograd.grad(scaled, leaves, allow_unused=True)
            pairs = [(total, new) for total, new in zip(gradients, computed, strict=True) if new is not None]
            torch._foreach_add_([total for total, _ in pairs], [new for _, new in pairs])
            self.packed.flat.needs_average = True

        return ForwardResult(LinearCrossEntropy(*(x.detach() for x in losses)), backward)


class _WithBackward(torch.autograd.Function):
    """A loss whose backward calls a given function."""

    @staticmethod
    def forward(ctx: Any, trigger: Tensor, loss: Tensor, backward: Callable[[Tensor], None]) -> Tensor:
        ctx.run = backward
        return loss.clone()

    @staticmethod
    def backward(ctx: Any, scale: Tensor) -> tuple[None, None, None]:  # type: ignore[override]
        ctx.run(scale)
        return None, None, None
