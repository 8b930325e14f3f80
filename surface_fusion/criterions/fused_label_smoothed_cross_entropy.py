"""``--criterion fused_label_smoothed_cross_entropy``: ``label_smoothed_cross_entropy``, faster.

There are three paths, which compute the same loss. A training uses the first one that supports its settings,
and logs which one and why not a faster one:

1. packed: forward, loss and backward without padding, in CUDA graphs on a GPU (``packed/step.py``);
2. fused: the model's own forward, then output layer and loss as one operation
   (``ops/linear_cross_entropy.py``);
3. plain: fairseq's loss (``--sf-plain``).

With hard fusion, it also logs ``normalized_nll_loss`` and ``normalized_ppl``, those of the renormalised
distribution, which can be compared with the loss and perplexity of other models.
"""

import logging
import math
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

import torch
from fairseq import utils
from fairseq.criterions import register_criterion
from fairseq.criterions.label_smoothed_cross_entropy import (
    LabelSmoothedCrossEntropyCriterion,
    LabelSmoothedCrossEntropyCriterionConfig,
    label_smoothed_nll_loss,
)
from fairseq.logging import metrics
from torch import Tensor

from surface_fusion.config.flags import PLAIN_HELP, config_of
from surface_fusion.criterions.statistics import OverlappedStatistics
from surface_fusion.modules.fused_loss import fused_losses
from surface_fusion.modules.stacks import unwrapped
from surface_fusion.ops.linear_cross_entropy import LinearCrossEntropy
from surface_fusion.ops.precision import at_least_float32
from surface_fusion.packed.eligibility import more_batches_follow, why_not_fused, why_not_packed
from surface_fusion.packed.flat_parameters import flat_of
from surface_fusion.packed.step import PackedStep
from surface_fusion.packed.transformer import PackedTransformer

logger = logging.getLogger(__name__)


@dataclass(frozen=True, eq=False)
class LossPath:
    """How the loss is computed; :attr:`step` is the packed training step of the first path."""

    step: PackedStep | None = None


FUSED, PLAIN = LossPath(), LossPath()
"""The second and the third path; compare by identity."""


@dataclass
class FusedLabelSmoothedCrossEntropyConfig(LabelSmoothedCrossEntropyCriterionConfig):
    """Flags of ``label_smoothed_cross_entropy``, and ``--sf-plain``."""

    sf_plain: bool = field(default=False, metadata={"help": PLAIN_HELP})


@register_criterion("fused_label_smoothed_cross_entropy", dataclass=FusedLabelSmoothedCrossEntropyConfig)
class FusedLabelSmoothedCrossEntropyCriterion(LabelSmoothedCrossEntropyCriterion):
    """Label-smoothed cross entropy on the fastest path available, see the module's docstring."""

    def __init__(
        self,
        task: Any,
        sentence_avg: bool,
        label_smoothing: float,
        ignore_prefix_size: int = 0,
        report_accuracy: bool = False,
        sf_plain: bool = False,
    ) -> None:
        super().__init__(task, sentence_avg, label_smoothing, ignore_prefix_size, report_accuracy)
        self.sf_plain = sf_plain
        self._paths: WeakKeyDictionary[Any, LossPath] = WeakKeyDictionary()
        self.statistics = OverlappedStatistics()

    def forward(
        self, model: Any, sample: dict[str, Any], reduce: bool = True
    ) -> tuple[Tensor, Any, dict[str, Any]]:
        """Return the summed loss, the sample size and the logging output, as fairseq's criterion does.

        On the fast paths ``--report-accuracy`` needs an additional forward.
        """
        path = self._path_of(model) if reduce else PLAIN
        heartbeat = getattr(model, "_heartbeat", None)
        if heartbeat is not None:
            # Set by DistributedTimeoutWrapper.forward, which the packed step bypasses.
            heartbeat.set()
        net_output = model(**sample["net_input"]) if path is PLAIN else None
        if path.step is not None:
            losses = (
                path.step.evaluate(sample) if not model.training else self._train(path.step, model, sample)
            )
        elif path is FUSED:
            losses = self._fused(model, sample)
        else:
            losses = self._plain(model, net_output, sample, reduce)
        sentences = sample["target"].shape[0]
        sample_size = sentences if self.sentence_avg else sample["ntokens"]
        logged = {"loss": losses.loss.detach(), "nll_loss": losses.nll.detach()}
        if reduce and unnormalised(model):
            logged["normalized_nll_loss"] = losses.normalized_nll
        if path.step is not None and model.training:
            logged = self._on_host(logged)
        logging_output = {
            **logged,
            "ntokens": sample["ntokens"],
            "nsentences": sentences,
            "sample_size": sample_size,
        }
        if self.report_accuracy:
            with torch.no_grad():
                net_output = net_output or model(**sample["net_input"])
                correct, total = self.compute_accuracy(model, net_output, sample)
            logging_output["n_correct"] = utils.item(correct)
            logging_output["total"] = utils.item(total)
        if path.step is not None and model.training:
            self.statistics.add(logging_output)
        return losses.loss, sample_size, logging_output

    def _path_of(self, model: Any) -> LossPath:
        """Return the path of *model*, selected once, and again if a parameter of a packed step is frozen.

        All processes of a training must select the same path. While the model has a hook, as within
        fairseq's ``NanDetector``, its modules run instead of the packed step.
        """
        path = self._paths.get(model)
        if path is None or (path.step is not None and not path.step.packed.flat.requires_grad):
            path, description = self._select_path(model)
            self._paths[model] = path
            level = logging.INFO if model.training else logging.DEBUG  # DEBUG for validation alone
            logger.log(level, f"fused_label_smoothed_cross_entropy: {description}")
        return FUSED if path.step is not None and unwrapped(model)._forward_hooks else path

    def packed_step(self, model: Any) -> PackedStep | None:
        """Return the packed training step of *model*; None if another path or none is selected."""
        path = self._paths.get(model)
        return None if path is None else path.step

    def _select_path(self, model: Any) -> tuple[LossPath, str]:
        """Select the path of *model*, and describe it for the log."""
        reason = "--sf-plain" if self.sf_plain else why_not_fused(model)
        if reason is not None:
            return PLAIN, f"fairseq's loss, because of {reason}"
        reason, flat = why_not_packed(model), flat_of(unwrapped(model))
        if self.ignore_prefix_size > 0 and getattr(self.task.cfg, "left_pad_target", False):
            reason = "--ignore-prefix-size with --left-pad-target"  # the prefix then includes padding
        if reason is not None and getattr(model, "find_unused_parameters", False):
            # torch's DDP would count the output layer, which the fused loss reads outside of the forward.
            return PLAIN, f"the plain loss, because of unused parameters in --ddp-backend, and {reason}"
        if reason is not None or flat is None:
            return FUSED, f"output layer and loss fused; layers with padding, because of {reason}"
        packed = PackedTransformer(unwrapped(model), flat)
        step = PackedStep(packed, self.eps, self.ignore_prefix_size)
        device = (
            "in CUDA graphs; the first updates on a machine compile GPU kernels"
            if flat.data.is_cuda
            else "on the CPU"
        )
        return LossPath(step), f"batches without padding, {device}"

    def _train(self, step: PackedStep, model: Any, sample: dict[str, Any]) -> LinearCrossEntropy:
        return step.train(
            sample, last_of_update=not more_batches_follow(model), before_last_backward=self.statistics.start
        )

    def _fused(self, model: Any, sample: dict[str, Any]) -> LinearCrossEntropy:
        features = model(**sample["net_input"], features_only=True)[0]
        prefix = self.ignore_prefix_size
        decoder = unwrapped(model).decoder
        return fused_losses(decoder, features, sample, smoothing=self.eps, ignore_prefix_size=prefix)

    def _plain(self, model: Any, net_output: Any, sample: dict[str, Any], reduce: bool) -> LinearCrossEntropy:
        log_probs, target = self.get_lprobs_and_target(model, net_output, sample)
        loss, nll = label_smoothed_nll_loss(log_probs, target, self.eps, self.padding_idx, reduce)
        normalized = nll.detach()
        if reduce and unnormalised(model):
            with torch.no_grad():
                total = at_least_float32(log_probs).logsumexp(dim=-1)
                normalized = normalized + total.masked_fill(target.eq(self.padding_idx), 0).sum()
        return LinearCrossEntropy(loss, nll, normalized)

    def _on_host(self, logged: dict[str, Tensor]) -> dict[str, Tensor]:
        """Copy the values to the CPU asynchronously: the trainer later waits for the gradient norm.

        With several processes, the values stay on the GPU, where :attr:`statistics` sums them.
        """
        several_processes = torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1
        if several_processes or not all(value.is_cuda for value in logged.values()):
            return logged
        values = torch.empty(len(logged), pin_memory=True)
        values.copy_(torch.stack(list(logged.values())), non_blocking=True)
        return dict(zip(logged, values.unbind(), strict=True))

    @classmethod
    def reduce_metrics(cls, logging_outputs: list[dict[str, Any]]) -> None:
        """Aggregate as fairseq does, and log the normalised perplexity."""
        # fairseq's meters handle numbers faster than tensors, and the GPU is idle meanwhile.
        logging_outputs = [
            {name: value.item() if torch.is_tensor(value) else value for name, value in output.items()}
            for output in logging_outputs
        ]
        super().reduce_metrics(logging_outputs)
        if any("normalized_nll_loss" in log for log in logging_outputs):
            total = sum(log.get("normalized_nll_loss", 0) for log in logging_outputs)
            ntokens = sum(log.get("ntokens", 0) for log in logging_outputs)
            metrics.log_scalar("normalized_nll_loss", total / ntokens / math.log(2), ntokens, round=3)
            metrics.log_derived(
                "normalized_ppl", lambda meters: utils.get_perplexity(meters["normalized_nll_loss"].avg)
            )


def unnormalised(model: Any) -> bool:
    """Whether *model* uses the published hard fusion, whose probabilities sum to less than 1."""
    cfg = config_of(model)
    return cfg is not None and cfg.unnormalised
