"""The table of repairs of fairseq, applied when this package is registered.

fairseq is no longer released. Each entry of :data:`REPAIRS` wraps one attribute of it and names the fault,
the report (an issue of facebookresearch/fairseq) and the probe, a function in ``tests/compat/probes`` that
shows the fault in plain fairseq. A test fails when a probe no longer finds its fault: the entry can then be
removed. ``docs/repairs.md`` shows the table.
"""

import functools

from surface_fusion.compat import (
    batching,
    changed_data,
    checkpoint_allowlist,
    checkpoint_integrity,
    checkpoint_loading,
    checkpoint_saving,
    cpu_processes,
    eval_bleu,
    global_state,
    hub,
    interactive,
    line_endings,
    model_overrides,
    nan_detector,
    numpy_names,
    resume,
    safe_eval,
    safe_readers,
    search_options,
    shards,
    tasks,
    time_limits,
    user_dir,
)
from surface_fusion.compat.checkpoint_loading import allow_checkpoint_classes
from surface_fusion.compat.patching import Repair
from surface_fusion.compat.warning_filters import filter_harmless_warnings

CHECKPOINTS = "fairseq.checkpoint_utils"
TRAINER = "fairseq.trainer.Trainer"
DISTRIBUTED = "fairseq.distributed.utils"
EPOCHS = "fairseq.data.iterators.EpochBatchIterator"
PLATEAU = "fairseq.optim.lr_scheduler.reduce_lr_on_plateau.ReduceLROnPlateauLRSchedule"
MODEL_WRAPPER = "fairseq.models.distributed_fairseq_model"
TASK = "fairseq.tasks.fairseq_task.FairseqTask"
HUB = "fairseq.hub_utils.GeneratorHubInterface"

# fmt: off
REPAIRS: tuple[Repair, ...] = (
    # -- Run no code from files, and report files and settings that cannot be used. --
    Repair(CHECKPOINTS, "load_checkpoint_to_cpu", checkpoint_loading.explain_bad_checkpoint,
           "A file that is not a checkpoint, or not a safe one, ends in a traceback that does not name it.",
           probe="foreign_checkpoint_is_not_named", report="fs 5610, 5603"),
    Repair(CHECKPOINTS, "_upgrade_state_dict", checkpoint_loading.upgrade_published_checkpoint,
           "Checkpoints of the published code are loaded as plain Transformers.",
           probe="published_checkpoint_is_plain"),
    Repair(CHECKPOINTS, "load_checkpoint_to_cpu", model_overrides.refuse_unknown_names,
           "A misspelt name in --model-overrides is ignored.",
           probe="misspelt_override_is_ignored"),
    *(
        Repair(module, "eval", safe_eval.parse_literal,
               "Strings of checkpoints, configurations and data files are evaluated as Python code.",
               probe="text_is_evaluated")
        for module in safe_eval.MODULES
    ),
    Repair(CHECKPOINTS, "load_checkpoint_to_cpu", checkpoint_allowlist.refuse_interpolations,
           "Interpolations in a checkpoint read the environment and call resolvers.",
           probe="checkpoint_reads_environment"),
    Repair(CHECKPOINTS, "load_checkpoint_to_cpu", checkpoint_allowlist.load_allowed,
           "A checkpoint may select any model, task and option; some run commands or fetch URLs.",
           probe="checkpoint_names_any_model"),
    Repair(CHECKPOINTS, "load_model_ensemble_and_task", checkpoint_allowlist.build_allowed,
           "A checkpoint may select any model, task and option; some run commands or fetch URLs.",
           probe="checkpoint_names_any_model"),
    Repair("fairseq.utils", "parse_embedding", checkpoint_allowlist.skip_initial_embeddings,
           "Loading a trained model reads the file of --encoder-embed-path, which may be gone or endless.",
           probe="trained_model_reads_embeddings"),
    Repair("fairseq.data.fasta_dataset.FastaDataset", "_build_index", safe_readers.index_fasta_without_shell,
           "The name of a FASTA file is passed to a shell, which runs commands in it.",
           probe="fasta_name_reaches_shell"),
    Repair("fairseq.data.audio.data_cfg", "get_config_from_yaml", safe_readers.read_yaml_safely,
           "The YAML of speech data may name Python objects.",
           probe="yaml_names_code"),
    Repair("fairseq.file_utils", "load_archive_file", safe_readers.extract_archive_inside,
           "A model archive may write files outside of its folder.",
           probe="archive_writes_anywhere"),
    # -- Verify and save checkpoints; resume with the state of the interrupted training. --
    # These are outside of the wrappers above: they check what those have loaded.
    Repair(CHECKPOINTS, "load_checkpoint_to_cpu", checkpoint_integrity.load_intact,
           "A checkpoint with flipped bits or NaN is loaded without an error.",
           probe="flipped_bit_is_loaded"),
    Repair(CHECKPOINTS, "load_ema_from_checkpoint", checkpoint_integrity.load_intact_ema,
           "A checkpoint with flipped bits is loaded without an error.",
           probe="flipped_bit_is_loaded_as_ema"),
    # Of Trainer: only there --restore-file and --reset-optimizer are known.
    Repair(TRAINER, "load_checkpoint", checkpoint_integrity.load_newest_intact,
           "A damaged checkpoint_last.pt ends the training although the folder has intact checkpoints.",
           probe="damaged_last_checkpoint_is_fatal"),
    Repair(CHECKPOINTS, "torch_persistent_save", checkpoint_saving.save_atomically,
           "A failed save appends its next attempt to the file of the first and leaves that behind.",
           probe="failed_save_leaves_file"),
    Repair("fairseq.file_io.PathManager", "copy", checkpoint_saving.copy_atomically,
           "checkpoint_best.pt and checkpoint_last.pt are overwritten in place; a killed save breaks them.",
           probe="copy_is_in_place"),
    Repair(CHECKPOINTS, "verify_checkpoint_directory", checkpoint_saving.check_folder,
           'The test of --save-dir overwrites and removes a file named "dummy" of the user.',
           probe="dummy_file_is_removed"),
    Repair(CHECKPOINTS, "save_checkpoint", checkpoint_saving.keep_n_best,
           "--keep-best-checkpoints keeps only values better than the worst kept, however few there are.",
           probe="second_best_is_not_kept"),
    Repair(CHECKPOINTS, "save_checkpoint", checkpoint_saving.save_interval_at_end_of_epoch,
           "--save-interval-updates writes no file for an update that ends an epoch.",
           probe="update_that_ends_epoch_is_not_saved"),
    Repair(CHECKPOINTS, "load_checkpoint", checkpoint_saving.check_space,
           "A disk that is too small for a checkpoint is noticed at the first save.",
           probe="lack_of_space_is_noticed_late"),
    Repair(TASK, "get_batch_iterator", resume.reuse_first_epochs_batches,
           "A training resumed after the first epoch makes other batches; it repeats and skips sentences.",
           probe="resume_makes_other_batches", report="fs 781"),
    # Of Trainer: only it has the schedule and, here, the validation loss.
    Repair(TRAINER, "load_checkpoint", resume.with_last_validation,
           "A checkpoint is saved before the schedule gets the validation loss, which is lost in a resume.",
           probe="resume_drops_validation_loss"),
    Repair(TRAINER, "load_checkpoint", resume.with_advice_on_resets,
           "The error for the optimizer state of another training does not name --reset-optimizer.",
           probe="reset_is_not_advised"),
    Repair(PLATEAU, "state_dict", resume.with_bad_epochs,
           "reduce_lr_on_plateau does not save the number of epochs without a better loss.",
           probe="plateau_saves_no_bad_epochs"),
    Repair(PLATEAU, "load_state_dict", resume.load_bad_epochs,
           "reduce_lr_on_plateau does not load the number of epochs without a better loss.",
           probe="plateau_loads_no_bad_epochs"),
    Repair(EPOCHS, "state_dict", resume.save_process_count,
           "A resume with another number of processes repeats or skips sentences.",
           probe="number_of_processes_is_not_saved", report="fs 3638"),
    Repair(EPOCHS, "load_state_dict", resume.rescale_position,
           "A resume with another number of processes repeats or skips sentences.",
           probe="fewer_processes_repeat_sentences", report="fs 3638"),
    # -- Data sets and batches --
    Repair("fairseq.tasks", "setup_task", batching.name_missing_data,
           "A missing data folder or dictionary is not named.",
           probe="missing_folder_is_not_named"),
    Repair("fairseq.data.data_utils", "load_indexed_dataset", batching.name_empty_data,
           "An empty data file is not named.",
           probe="empty_data_file_is_not_named"),
    Repair("fairseq.data.data_utils", "batch_by_size", batching.keep_last_batch,
           "The last batch is dropped if its size is not a multiple of 8.",
           probe="last_batch_is_dropped", report="fs 5036"),
    Repair(TASK, "filter_indices_by_size", batching.skip_overlong_sentences,
           "A sentence longer than the model's positions ends validation and generation.",
           probe="overlong_sentence_is_fatal", report="fs 1853, 2998, 2650"),
    Repair("fairseq.data.concat_dataset.ConcatDataset", "__init__", batching.accept_split_training_sets,
           "train, train1, ... cannot be read with the default of --upsample-primary.",
           probe="split_data_needs_flag", report="fs 3644"),
    *(
        Repair(f"fairseq.data.{owner}", attribute, numpy_names.with_removed_names,
               "--num-batch-buckets and --sample-break-mode eos use names that numpy has removed.",
               probe="removed_names_of_numpy_are_used")
        for owner, attribute in (
            ("bucket_pad_length_dataset", "get_buckets"),
            ("audio.raw_audio_dataset", "get_buckets"),
            ("language_pair_dataset.LanguagePairDataset", "__init__"),
            ("token_block_dataset.TokenBlockDataset", "__init__"),
        )
    ),
    # -- Generation --
    Repair("fairseq.search.DiverseBeamSearch", "step", search_options.map_sentence_ids,
           "--diverse-beam-groups takes ids of sentences for rows, which fails once a sentence is finished.",
           probe="diverse_beam_fails"),
    Repair("fairseq.ngram_repeat_block.NGramRepeatBlock", "_no_repeat_ngram",
           search_options.block_written_ngrams,
           "--no-repeat-ngram-size also searches the unused columns after the current step.",
           probe="ngrams_are_repeated", report="fs 5206"),
    Repair("fairseq.utils", "load_align_dict", search_options.accept_replace_unk_alone,
           '--replace-unk without a dictionary opens its default "@@ " as a file.',
           probe="replace_unk_needs_file"),
    Repair("fairseq.utils", "post_process_prediction", search_options.replace_unknown_words,
           "--replace-unk fails on each <unk>, and counts words where the alignment counts subwords.",
           probe="replace_unk_fails"),
    Repair(TASK, "build_generator", search_options.align_for_replacement,
           "--replace-unk has no alignment to use; --print-step fails after the first batch.",
           probe="replace_unk_has_no_alignment"),
    Repair("fairseq_cli.generate", "main", search_options.refuse_options_of_interactive,
           "generate fails on --constraints, and on --replace-unk with binarised data.",
           probe="generate_takes_constraints"),
    Repair("fairseq.tasks.translation.TranslationTask", "reduce_metrics", eval_bleu.count_empty_hypotheses,
           "--eval-bleu logs no BLEU if all hypotheses are empty.",
           probe="empty_hypotheses_have_no_bleu"),
    Repair(HUB, "generate", hub.keep_order_of_lines,
           "The hub drops lines that are too long, which shifts the results of all later lines.",
           probe="hub_drops_long_line"),
    Repair(HUB, "_build_batches", hub.raise_max_tokens,
           "The hub fails on a line longer than the --max-tokens of the training.",
           probe="hub_is_limited_by_training"),
    Repair("fairseq_cli.interactive", "buffered_read", interactive.read_buffers,
           "interactive splits its input at carriage returns, too.",
           probe="carriage_return_ends_typed_line"),
    Repair("fairseq_cli.interactive", "make_batches", interactive.batch_each_line,
           "interactive fails on a line that is too long for the model, or prints no result for it.",
           probe="interactive_fails_on_long_line"),
    Repair("fairseq_cli.generate", "main", shards.generate_shard,
           "generate ignores --num-shards and --shard-id.",
           probe="generate_ignores_shards"),
    Repair(DISTRIBUTED, "call_main", shards.evaluate_shard,
           "validate ignores --num-shards and --shard-id.",
           probe="validate_ignores_shards"),
    Repair("fairseq.data.data_utils", "batch_by_size", shards.batch_shard,
           "eval-lm splits batches into shards, of which there may be fewer than shards.",
           probe="batches_are_split_into_shards"),
    # -- Text files --
    *(
        Repair(module, "find_offsets", line_endings.find_line_feeds,
               "A carriage return within a line ends it, which misaligns the parallel text.",
               probe="carriage_return_breaks_offsets")
        for module in ("fairseq.file_chunker_utils", "fairseq.binarizer", "fairseq.data.dictionary")
    ),
    Repair("fairseq.file_chunker_utils.Chunker", "__enter__", line_endings.open_bytes,
           "A carriage return within a line ends it, which misaligns the parallel text.",
           probe="carriage_return_ends_line"),
    Repair("fairseq.file_chunker_utils.ChunkLineIterator", "__iter__", line_endings.decode_lines,
           "The error for text that is not UTF-8 does not name the file and line.",
           probe="line_of_bad_text_is_not_named"),
    Repair("fairseq.data.indexed_dataset.IndexedRawTextDataset", "read_data", line_endings.read_raw_text,
           "A carriage return within a line ends it, which misaligns the parallel text.",
           probe="carriage_return_ends_raw_line"),
    Repair("fairseq.data.dictionary", "open", line_endings.open_text,
           "A carriage return in a dictionary ends the line.",
           probe="carriage_return_ends_dictionary_line"),
    Repair("fairseq.utils", "open", line_endings.open_text,
           "A carriage return in a file of embeddings or of word alignments ends the line.",
           probe="carriage_return_ends_embedding"),
    Repair("fairseq_cli.preprocess", "open", line_endings.open_marked_text,
           "preprocess --alignfile splits the text at carriage returns and keeps a byte order mark.",
           probe="alignments_are_read_with_mark"),
    # -- Tasks, data files and state of a process --
    Repair("fairseq.tasks.fairseq_task.StatefulContainer", "__getattr__", tasks.find_no_attribute_before_init,
           "Copying or unpickling a task recurses without end.",
           probe="task_cannot_be_copied"),
    Repair("fairseq.utils", "import_user_module", user_dir.accept_second_copy,
           "--user-dir is refused if a package of the same name is already imported.",
           probe="second_copy_is_refused", report="fs 2081"),
    Repair("fairseq.tasks", "setup_task", changed_data.forget_files,
           "A training reads on from data files that were removed or changed, and ends with status 0.",
           probe="removed_data_is_read"),
    Repair("fairseq.data.data_utils", "load_indexed_dataset", changed_data.record_files,
           "A training reads on from data files that were removed or changed, and ends with status 0.",
           probe="removed_data_is_read"),
    Repair(EPOCHS, "next_epoch_itr", changed_data.check_files_before_epoch,
           "A training reads on from data files that were removed or changed, and ends with status 0.",
           probe="removed_data_is_read"),
    Repair(CHECKPOINTS, "save_checkpoint", changed_data.check_files_after_save,
           "A training reads on from data files that were removed or changed, and ends with status 0.",
           probe="removed_data_is_read"),
    # Inside of start_without_old_state, which clears the count of --patience.
    Repair(CHECKPOINTS, "load_checkpoint", resume.end_finished_training,
           "A finished training that is started again does one more update.",
           probe="finished_training_goes_on"),
    Repair(CHECKPOINTS, "load_checkpoint", global_state.start_without_old_state,
           "A second training in one process keeps the best value, --patience and log files of the first.",
           probe="best_value_outlives_training"),
    Repair("fairseq.nan_detector.NanDetector", "add_hooks", nan_detector.hook_tensors,
           "After a training has diverged, NanDetector fails with StopIteration instead of naming a module.",
           probe="nan_detector_fails"),
    # -- Several processes --
    Repair(DISTRIBUTED, "distributed_init", time_limits.limit_first_group,
           "A process waits half an hour for one that is missing or has stopped, and does not name it.",
           probe="first_group_has_no_limit"),
    *(
        Repair(DISTRIBUTED, attribute, time_limits.limit_further_groups,
               "A process waits half an hour for one that is missing or has stopped, and does not name it.",
               probe="further_groups_have_no_limit")
        for attribute in ("get_global_group", "new_groups")
    ),
    Repair(CHECKPOINTS, "load_checkpoint", time_limits.limit_existing_group,
           "fairseq-hydra-train imports --user-dir after its process group exists, with torch's timeout.",
           probe="first_group_has_no_limit"),
    Repair(DISTRIBUTED, "call_main", time_limits.watch_main,
           "The error of a process whose partner has stopped does not name the rank.",
           probe="failing_rank_is_not_named"),
    # Outside of watch_main: decides what that gets.
    Repair(DISTRIBUTED, "call_main", cpu_processes.start_processes_on_cpus,
           "--distributed-world-size starts no process without GPUs, and torchrun fails.",
           probe="cpu_processes_are_not_started"),
    Repair(MODEL_WRAPPER, "DistributedDataParallel", cpu_processes.without_device_ids,
           "torch's DistributedDataParallel gets a device id for a model on the CPU, which it refuses.",
           probe="ddp_gets_device_on_cpu"),
    Repair(MODEL_WRAPPER, "DistributedDataParallel", cpu_processes.find_unused_parameters,
           "--ddp-backend pytorch_ddp fails with LayerDrop: a dropped layer's parameters have no gradient.",
           probe="ddp_finds_no_unused_parameters"),
)
# fmt: on
"""All wrappers in the order in which they are applied: of one attribute, the last is the outermost."""


@functools.cache
def apply() -> None:
    """Apply all repairs, once per process."""
    filter_harmless_warnings()
    allow_checkpoint_classes()
    for repair in REPAIRS:
        repair.apply()
