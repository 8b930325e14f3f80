"""Patches for fairseq, applied when this package is imported.

fairseq is no longer released; the patches apply to the re-uploads of its main branch, ve-fairseq
0.12.3 and fairseq-fixed 0.12.3.1. Each function fixes one fault and names the report that it answers ("fs" =
an issue of facebookresearch/fairseq). ``tests/test_compat.py`` has a test for each that fails once fairseq no
longer needs it.

The order of the calls matters where several patches wrap the same function: each later wrap is the outer one.
"""

import functools

from fairseq import checkpoint_utils
from fairseq.data import data_utils
from fairseq.data.iterators import EpochBatchIterator
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
from surface_fusion.compat.last_batches import keep_last_batch
from surface_fusion.compat.literals import parse_literals
from surface_fusion.compat.patching import wrap
from surface_fusion.compat.process_state import start_each_training_anew
from surface_fusion.compat.shards import read_one_shard
from surface_fusion.compat.silence import silence_harmless_warnings
from surface_fusion.compat.tasks import allow_second_copy, fix_copies_of_tasks
from surface_fusion.compat.text_files import end_lines_at_line_feeds
from surface_fusion.compat.untrusted_files import restrict_untrusted_files
from surface_fusion.config.overrides import refuse_unknown


@functools.cache
def apply() -> None:
    """Apply all patches, once per process."""
    silence_harmless_warnings()
    _restrict_inputs()
    _protect_checkpoints()
    _repair_fairseq()


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
