"""fairseq's trainer for SurfaceFusion models: the same updates with less overhead on the host.

Overrides call ``super()``, except ``_set_seed``. :mod:`surface_fusion.hooks` selects this class; with
``--sf-plain``, and for other models, fairseq's own trainer is used.
``docs/fast_path.md`` shows one update as a timeline.

The modules imported here describe their parts. This one adds (numbers are of the base model on an H200):

* Forward prefetch: the forward of the next batch is launched right after the optimizer step. The GPU was idle
  for 1.3 ms while the host logged, checked whether to validate or save, and fetched the batch.
* Gradient norms of the processes are compared one update later, in the overlapped sum; fairseq's check costs
  another operation and three synchronisations. The error is raised before the weights change a second time.
* torch's generators are seeded directly (0.9 ms: torch.compile's wrapper).
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import torch
from fairseq.data.iterators import BufferedIterator
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer
from torch import Tensor

from surface_fusion.criterions.fused_label_smoothed_cross_entropy import (
    FusedLabelSmoothedCrossEntropyCriterion,
)
from surface_fusion.criterions.statistics import OverlappedStatistics
from surface_fusion.data.balanced_batches import balance_batches
from surface_fusion.data.persistent_workers import keep_data_workers
from surface_fusion.packed.literal_padding import mark
from surface_fusion.training.cached_config import cache_lookups
from surface_fusion.training.memory_check import run_longest_batch

Contents = list[tuple[Any, int]]


class PrefetchedBatch(NamedTuple):
    """A batch whose forward was launched before the trainer received it."""

    batch: Mapping[str, Any]
    """The batch in the data buffer."""
    contents: Contents
    """Its values at launch, see :func:`_contents`."""
    on_device: Mapping[str, Any]
    """Its copy on the GPU."""


class SurfaceFusionTrainer(Trainer):
    """Trainer of SurfaceFusion models without ``--sf-plain``, see the module's docstring."""

    def __init__(self, cfg: Any, task: Any, model: Any, criterion: Any, quantizer: Any = None) -> None:
        self._train_iterator: Any = None
        self._buffer: BufferedIterator | None = None
        """The data buffer of the current epoch; it also holds the batches that follow."""
        self._prefetched: PrefetchedBatch | None = None
        self._in_update = False
        self._memory_checked = False
        self._unchecked_norm: float | None = None
        """Gradient norm of the last update, if the processes' norms have not been compared."""
        self._gathered_norms: list[float] | None = None
        """Norms of the last update by process, -1 where it had none."""
        fused = isinstance(criterion, FusedLabelSmoothedCrossEntropyCriterion)
        self._statistics: OverlappedStatistics | None = criterion.statistics if fused else None
        super().__init__(cfg, task, model, criterion, quantizer)
        cache_lookups(self.cfg)
        cache_lookups(getattr(task, "cfg", None))

    def _build_optimizer(self) -> None:
        super()._build_optimizer()
        cache_lookups(getattr(self._lr_scheduler, "cfg", None))  # its own copy

    # -- data -----------------------------------------------------------------------------------------

    def get_train_iterator(self, *args: Any, **kwargs: Any) -> Any:
        """Return the iterator of an epoch, with balanced batches and the previous epoch's data workers."""
        previous = self._train_iterator
        iterator = self._train_iterator = super().get_train_iterator(*args, **kwargs)
        if previous is not None and self.task.can_reuse_epoch_itr(iterator.dataset):
            keep_data_workers(previous, iterator, self.cfg)
        balance_batches(iterator, rounded=self.cuda)
        return iterator

    def begin_epoch(self, epoch: int) -> None:
        """Start an epoch; on a GPU, run the longest batch before the first one."""
        super().begin_epoch(epoch)
        buffer = getattr(getattr(self._train_iterator, "_cur_epoch_itr", None), "_itr", None)
        self._buffer = buffer if isinstance(buffer, BufferedIterator) else None
        if self.cuda and not self._memory_checked:
            self._memory_checked = True
            run_longest_batch(self, self._train_iterator)

    def _prepare_sample(self, sample: Any, is_dummy: bool = False) -> tuple[Any, bool]:
        if self._statistics is not None and isinstance(sample, dict):  # only the packed step reads it
            mark(sample, self.task.target_dictionary.pad())  # on a GPU it would force a synchronisation
        return super()._prepare_sample(sample, is_dummy)

    # -- one update -----------------------------------------------------------------------------------

    def train_step(self, samples: Sequence[Any], raise_oom: bool = False) -> Any:
        """Run one update on *samples*, the batches of this process.

        Dummy batches that follow real ones are left out. They pad the last update of an epoch with
        ``--update-freq`` in several processes; fairseq would then count none of the tokens, but still add
        their gradient. FSDP keeps dummies, because all its processes must take part in every batch.
        """
        real = [sample for sample in samples if sample is not None and len(sample) > 0]
        samples = self._with_prefetched(samples if self.is_fsdp or not real else real)
        if self._statistics is not None and self._sync_stats():
            extra = [self._local_cumulative_training_time(), *self._norm_slots()]
            self._statistics.expect(extra, self.data_parallel_process_group)
        self._in_update = True
        model = self.get_model()
        try:
            with model.module_tree.constant(model):
                return super().train_step(samples, raise_oom)
        finally:
            self._in_update = False

    def _set_seed(self) -> None:
        seed = self._seed(self.get_num_updates())
        torch.default_generator.manual_seed(seed)
        if self.cuda:
            torch.cuda.default_generators[torch.cuda.current_device()].manual_seed(seed)

    def _seed(self, num_updates: int) -> int:
        """fairseq's seed of the update that follows *num_updates*; it makes resuming exact."""
        return int(self.cfg.common.seed + num_updates)

    def set_num_updates(self, num_updates: int) -> None:
        """Set the number of updates; after an optimizer step, also launch the next batch's forward."""
        if self._in_update:
            self._in_update = False
            try:
                self._launch_next_forward(self._seed(num_updates))
            except RuntimeError as error:
                if "out of memory" not in str(error):  # fairseq handles that when it reaches the batch
                    raise
        super().set_num_updates(num_updates)

    # -- forward prefetch -----------------------------------------------------------------------------

    def _launch_next_forward(self, seed: int) -> None:
        """Launch the forward of the batch that the data buffer returns next, if it is there already."""
        waiting: Sequence[Any] = () if self._buffer is None else self._buffer._queue.queue
        step = None if self._statistics is None else self.get_criterion().packed_step(self.model)
        if step is None or not waiting or not self._runs_fairseqs_steps():
            return
        batch = waiting[0]
        if not isinstance(batch, dict) or not batch:  # the end of the epoch, an error, or a dummy
            return
        mark(batch, self.task.target_dictionary.pad())
        if step.can_prefetch(batch):
            sample, _ = self._prepare_sample(batch)
            step.prefetch(sample, seed)
            self._prefetched = PrefetchedBatch(batch, _contents(batch), sample)

    def _with_prefetched(self, samples: Sequence[Any]) -> Sequence[Any]:
        """*samples*, with the first replaced by its GPU copy if its forward was launched."""
        prefetched, self._prefetched = self._prefetched, None
        if prefetched is None or not samples or samples[0] is not prefetched.batch:
            return samples
        if not _same(prefetched.contents, _contents(samples[0])):
            return samples
        return [prefetched.on_device, *samples[1:]]

    def _runs_fairseqs_steps(self) -> bool:
        """Whether the task trains by fairseq's own steps; others may change weights unnoticed."""
        steps = self.task.train_step, self.task.optimizer_step
        fairseqs = FairseqTask.train_step, FairseqTask.optimizer_step
        return tuple(getattr(step, "__func__", None) for step in steps) == fairseqs

    # -- statistics and gradient norms over processes -------------------------------------------------

    def _fast_stat_sync_sum(self, logging_outputs: Any, *extra: Any, ignore: bool = False) -> Any:
        """Return the sums that the criterion started before the backward, if these are they."""
        sums = None
        if self._statistics is not None and self.model.training:
            sums = self._statistics.take(logging_outputs)
        if sums is None:
            return super()._fast_stat_sync_sum(logging_outputs, *extra, ignore=ignore)
        output, (train_time, *norms) = sums
        self._gathered_norms = norms or None
        _, ooms, _ = extra
        return [output], [output["sample_size"], ooms, train_time]

    def _norm_slots(self) -> list[float]:
        """A vector with the last update's norm at this process's rank; empty if none are compared."""
        if self._grad_norm_buf is None or self.cfg.common.amp:
            return []
        slots = [0.0] * len(self._grad_norm_buf)
        slots[self.data_parallel_rank] = -1.0 if self._unchecked_norm is None else self._unchecked_norm
        self._unchecked_norm = None
        return slots

    def _check_grad_norms(self, grad_norm: Tensor) -> None:
        """Compare the norms of the previous update if they were gathered, else this update's.

        Raises:
            FloatingPointError: the processes' gradient norms differ.
        """
        norms, self._gathered_norms = self._gathered_norms, None
        if norms is None:
            super()._check_grad_norms(grad_norm)
            return
        if not all(abs(norm - norms[0]) <= 1e-6 * abs(norms[0]) + 1e-12 for norm in norms):
            raise FloatingPointError(
                f"the gradient norms of the previous update differ between processes: {norms}; are the GPUs "
                "of one kind? --ddp-backend legacy_ddp, or adam instead of flat_adam, may help"
            )
        self._unchecked_norm = float(grad_norm)


def _contents(batch: Mapping[str, Any]) -> Contents:
    """All values in a batch, each with the version counter of its tensor."""
    contents: Contents = []
    for value in batch.values():
        contents += _contents(value) if isinstance(value, dict) else [(value, getattr(value, "_version", 0))]
    return contents


def _same(before: Contents, after: Contents) -> bool:
    return len(before) == len(after) and all(
        value is now and version == version_now
        for (value, version), (now, version_now) in zip(before, after, strict=True)
    )
