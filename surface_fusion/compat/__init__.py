"""Patches for fairseq, applied when this package is imported.

fairseq is no longer released; the patches apply to the re-uploads of its main branch, ve-fairseq
0.12.3 and fairseq-fixed 0.12.3.1. Each function fixes one fault and names the report that it answers ("fs" =
an issue of facebookresearch/fairseq). ``tests/test_compat.py`` has a test for each that fails once fairseq no
longer needs it.

The order of the calls matters where several patches wrap the same function: each later wrap is the outer one.
"""

import functools

from fairseq import checkpoint_utils
from fairseq.data import data_utils, language_pair_dataset
from fairseq.data.iterators import BufferedIterator, EpochBatchIterator
from fairseq.optim.lr_scheduler.reduce_lr_on_plateau import ReduceLROnPlateauLRSchedule
from fairseq.tasks import FairseqTask
from fairseq.trainer import Trainer

from surface_fusion.compat import resume
from surface_fusion.compat.batching import (
    accept_split_training_sets,
    explain_missing_data,
    skip_overlong_sentences,
)
from surface_fusion.compat.changed_data import notice_changed_data
from surface_fusion.compat.checkpoint_integrity import check_loaded_checkpoints
from surface_fusion.compat.checkpoint_loading import (
    TRUST_VARIABLE,
    allow_checkpoint_classes,
    explain_bad_checkpoints,
)
from surface_fusion.compat.checkpoint_saving import save_atomically
from surface_fusion.compat.data_files import (
    extract_archives_inside,
    index_fasta_without_shell,
    read_yaml_safely,
)
from surface_fusion.compat.distributed import start_processes_on_cpus, wait_for_each_other_in_time
from surface_fusion.compat.generation import fix_diverse_beam, fix_ngram_blocking, fix_replace_unk
from surface_fusion.compat.hub import keep_order_of_lines, translate_beyond_max_tokens
from surface_fusion.compat.interactive import answer_each_line
from surface_fusion.compat.last_batches import keep_last_batch, leave_out_dummies
from surface_fusion.compat.literals import parse_literals
from surface_fusion.compat.patching import wrap
from surface_fusion.compat.process_state import start_each_training_anew
from surface_fusion.compat.shards import read_one_shard
from surface_fusion.compat.silence import silence_harmless_warnings
from surface_fusion.compat.tasks import allow_second_copy, fix_copies_of_tasks
from surface_fusion.compat.text_files import end_lines_at_line_feeds
from surface_fusion.compat.untrusted_files import restrict_untrusted_files
from surface_fusion.config.overrides import refuse_unknown
from surface_fusion.data.balanced_batches import group_evenly
from surface_fusion.data.collate import collate_tokens
from surface_fusion.data.epoch_batches import make_batches_ahead
from surface_fusion.packed.host_overlap import fetch_while_waiting
from surface_fusion.packed.literal_padding import mark
from surface_fusion.training import fast_training, trainer
from surface_fusion.training.fast_training import wrap_if_fast
from surface_fusion.training.memory_check import remember_batches, try_longest_batch
from surface_fusion.training.next_batch import begin_next, remember_buffer, use_begun
from surface_fusion.training.notices import say_at_start

__all__ = ["TRUST_VARIABLE", "apply"]


@functools.cache
def apply() -> None:
    """Apply all patches, once per process."""
    silence_harmless_warnings()
    _restrict_inputs()
    _protect_checkpoints()
    _repair_fairseq()
    _make_trainings_fast()
    # Same results for every model and command.
    wrap(data_utils, "collate_tokens", collate_tokens)


def _restrict_inputs() -> None:
    """Run no code from files, and report files and settings that cannot be used."""
    allow_checkpoint_classes()
    explain_bad_checkpoints()
    wrap(checkpoint_utils, "load_checkpoint_to_cpu", refuse_unknown)
    parse_literals()
    restrict_untrusted_files()
    index_fasta_without_shell()
    read_yaml_safely()
    extract_archives_inside()


def _protect_checkpoints() -> None:
    """Verify and save checkpoints, and resume with the state of the interrupted training.

    After :func:`_restrict_inputs`: the checks of a loaded checkpoint are outside of those of its file.
    """
    check_loaded_checkpoints()
    save_atomically()
    wrap(FairseqTask, "get_batch_iterator", resume.with_first_epochs_batches)
    wrap(Trainer, "load_checkpoint", resume.with_last_validation)
    wrap(Trainer, "load_checkpoint", resume.with_advice_on_resets)
    wrap(ReduceLROnPlateauLRSchedule, "state_dict", resume.with_bad_epochs)
    wrap(ReduceLROnPlateauLRSchedule, "load_state_dict", resume.load_bad_epochs)
    wrap(EpochBatchIterator, "state_dict", resume.with_processes)
    wrap(EpochBatchIterator, "load_state_dict", resume.for_these_processes)


def _repair_fairseq() -> None:
    """Fix faults of fairseq's data sets, generation, tasks and training loop."""
    explain_missing_data()
    wrap(data_utils, "batch_by_size", keep_last_batch)
    wrap(Trainer, "train_step", leave_out_dummies)
    skip_overlong_sentences()
    accept_split_training_sets()
    fix_diverse_beam()
    fix_ngram_blocking()
    fix_replace_unk()
    keep_order_of_lines()
    translate_beyond_max_tokens()
    answer_each_line()
    read_one_shard()
    end_lines_at_line_feeds()
    fix_copies_of_tasks()
    allow_second_copy()
    notice_changed_data()
    start_each_training_anew()
    wait_for_each_other_in_time()
    start_processes_on_cpus()
    wrap(Trainer, "__init__", say_at_start)
    wrap(language_pair_dataset, "collate", mark)


def _make_trainings_fast() -> None:
    """Speed up the training of SurfaceFusion models without ``--sf-plain``; others are unchanged."""
    wrap_if_fast(Trainer, "__init__", trainer.build_quickly)
    wrap(Trainer, "__init__", fast_training.decide)  # around it: decides whether the training is fast
    wrap_if_fast(Trainer, "train_step", use_begun)
    # Outermost, because it keeps the batches as the trainer receives them.
    wrap_if_fast(Trainer, "train_step", trainer.announce_sums)
    wrap_if_fast(FairseqTask, "get_batch_iterator", make_batches_ahead)
    wrap_if_fast(FairseqTask, "get_batch_iterator", fast_training.mark_iterator)
    wrap_if_fast(EpochBatchIterator, "_get_iterator_for_epoch", fast_training.mark_buffer)
    wrap_if_fast(BufferedIterator, "_create_consumer", fetch_while_waiting)
    wrap_if_fast(BufferedIterator, "__next__", remember_buffer)
    wrap_if_fast(Trainer, "set_num_updates", begin_next)
    wrap_if_fast(Trainer, "get_train_iterator", trainer.keep_data_workers)
    wrap_if_fast(Trainer, "get_train_iterator", group_evenly)
    wrap_if_fast(Trainer, "get_train_iterator", remember_batches)
    wrap_if_fast(Trainer, "begin_epoch", try_longest_batch)
    wrap_if_fast(Trainer, "_build_optimizer", trainer.build_quick_schedule)
    wrap_if_fast(Trainer, "_set_seed", trainer.set_seed)
    wrap_if_fast(Trainer, "_check_grad_norms", trainer.compare_norms_later)
    wrap_if_fast(Trainer, "_fast_stat_sync_sum", trainer.sum_at_once)
    wrap_if_fast(Trainer, "_fast_stat_sync_sum", trainer.send_norm_along)
