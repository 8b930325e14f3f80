"""What fairseq needs on today's Python, torch and hydra, applied when the package is imported.

fairseq is no longer released; the versions meant here are the re-uploads of its main branch, ve-fairseq
0.12.3 and fairseq-fixed 0.12.3.1. Each function fixes one thing and says which report it
answers ("fs" = an issue of facebookresearch/fairseq). ``tests/test_compat.py`` has a test for each
that fails once fairseq no longer needs it.
"""

import functools

from fairseq.data import data_utils
from fairseq.data.iterators import BufferedIterator, EpochBatchIterator
from fairseq.distributed import utils as distributed_utils
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from surface_fusion import quick_search, quick_trainer, resume
from surface_fusion.batches_ahead import make_batches_ahead
from surface_fusion.compat.batching import explain_missing_data, mend_data_in_parts, skip_overlong_sentences
from surface_fusion.compat.checkpoint_integrity import check_loaded_checkpoints
from surface_fusion.compat.checkpoint_loading import (
    TRUST_VARIABLE,
    allow_checkpoint_classes,
    explain_bad_checkpoints,
)
from surface_fusion.compat.checkpoint_saving import save_whole_checkpoints
from surface_fusion.compat.generation import mend_diverse_beam, mend_ngram_blocking, mend_replace_unk
from surface_fusion.compat.patching import wrap
from surface_fusion.compat.tasks import allow_second_copy, mend_copies_of_tasks
from surface_fusion.early_step import begin_step, expect_step
from surface_fusion.even_batches import group_evenly
from surface_fusion.last_batches import keep_last_batch, leave_out_dummies
from surface_fusion.longest_batch import remember_batches, try_longest_batch
from surface_fusion.next_batch import begin_next, remember_buffer, use_begun
from surface_fusion.quick_collate import collate_tokens
from surface_fusion.quiet import silence_harmless_warnings
from surface_fusion.while_waiting import fetch_while_waiting

__all__ = ["TRUST_VARIABLE", "apply"]


@functools.cache
def apply() -> None:
    """Apply everything above, once a process."""
    silence_harmless_warnings()
    allow_checkpoint_classes()
    explain_bad_checkpoints()
    check_loaded_checkpoints()
    save_whole_checkpoints()
    explain_missing_data()
    wrap(data_utils, "batch_by_size", keep_last_batch)
    wrap(Trainer, "train_step", leave_out_dummies)
    wrap(Trainer, "train_step", use_begun)
    wrap(Trainer, "train_step", expect_step)
    wrap(Trainer, "train_step", quick_trainer.announce_sums)  # outermost: it keeps batches as they came
    skip_overlong_sentences()
    mend_data_in_parts()
    mend_diverse_beam()
    mend_ngram_blocking()
    mend_replace_unk()
    mend_copies_of_tasks()
    allow_second_copy()
    wrap(FairseqTask, "get_batch_iterator", resume.with_first_epochs_batches)
    wrap(FairseqTask, "get_batch_iterator", make_batches_ahead)
    wrap(Trainer, "load_checkpoint", resume.with_last_validation)
    wrap(Trainer, "load_checkpoint", resume.with_advice_on_resets)
    wrap(ReduceLROnPlateauLRSchedule, "state_dict", resume.with_bad_epochs)
    wrap(ReduceLROnPlateauLRSchedule, "load_state_dict", resume.load_bad_epochs)
    wrap(EpochBatchIterator, "state_dict", resume.with_processes)
    wrap(EpochBatchIterator, "load_state_dict", resume.for_these_processes)
    wrap(BufferedIterator, "_create_consumer", fetch_while_waiting)
    wrap(BufferedIterator, "__next__", remember_buffer)
    wrap(Trainer, "set_num_updates", begin_next)
    wrap(EpochBatchIterator, "first_batch", quick_trainer.keep_first_batch)
    wrap(Trainer, "get_train_iterator", quick_trainer.keep_data_workers)
    wrap(Trainer, "get_train_iterator", group_evenly)
    wrap(Trainer, "get_train_iterator", remember_batches)
    wrap(Trainer, "begin_epoch", try_longest_batch)
    wrap(Trainer, "__init__", quick_trainer.build_quickly)
    wrap(Trainer, "_build_optimizer", quick_trainer.build_quick_schedule)
    wrap(data_utils, "collate_tokens", collate_tokens)
    wrap(SequenceGenerator, "_generate", quick_search.generate)
    wrap(SequenceGenerator, "finalize_hypos", quick_search.finalize_on_host)
    wrap(Trainer, "_set_seed", quick_trainer.set_seed)
    wrap(Trainer, "clip_grad_norm", begin_step)
    wrap(Trainer, "_check_grad_norms", quick_trainer.compare_norms_later)
    wrap(Trainer, "_fast_stat_sync_sum", quick_trainer.send_norm_along)
    wrap(distributed_utils, "all_reduce_dict", quick_trainer.sum_over_processes)
