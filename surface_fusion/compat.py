"""What fairseq needs on today's Python, torch and hydra, applied when the package is imported.

fairseq is no longer released; the versions meant here are the re-uploads of its main branch, ve-fairseq
0.12.3 and fairseq-fixed 0.12.3.1. Each function mends one thing and says which report it
answers ("fs" = an issue of facebookresearch/fairseq). ``tests/test_compat.py`` has a test for each
that fails once fairseq no longer needs it.
"""

import argparse
import collections
import functools
import logging
import os
import pickle
import re
import sys
import typing
from collections.abc import Callable
from typing import Any

import numpy as np
import omegaconf
import torch
from fairseq import checkpoint_utils, search, tasks, utils
from fairseq.data import ConcatDataset, data_utils
from fairseq.data.iterators import BufferedIterator, EpochBatchIterator
from fairseq.distributed import utils as distributed_utils
from fairseq.models.transformer import transformer_config
from fairseq.ngram_repeat_block import NGramRepeatBlock
from fairseq.sequence_generator import SequenceGenerator
from fairseq.tasks import FairseqTask
from fairseq.tasks.fairseq_task import StatefulContainer
from fairseq.trainer import Trainer

from surface_fusion import quick_search, quick_trainer, resume
from surface_fusion.batches_ahead import make_batches_ahead
from surface_fusion.early_step import begin_step, expect_step
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.even_batches import group_evenly
from surface_fusion.last_batches import keep_last_batch, leave_out_dummies
from surface_fusion.longest_batch import remember_batches, try_longest_batch
from surface_fusion.next_batch import begin_next, remember_buffer, use_begun
from surface_fusion.quick_collate import collate_tokens
from surface_fusion.quiet import silence_harmless_warnings
from surface_fusion.while_waiting import fetch_while_waiting

logger = logging.getLogger(__name__)

TRUST_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""torch's environment variable that allows arbitrary pickles in checkpoints when it is 1."""


def _wrap(owner: Any, name: str, wrapper: Callable[..., Any]) -> None:
    """Replace the function, method or property ``owner.name`` by ``wrapper(original, ...)``."""
    found = getattr(owner, name)
    original: Any = found.fget if isinstance(found, property) else found

    @functools.wraps(original)
    def wrapped(*args: Any, **kwargs: Any) -> Any:
        return wrapper(original, *args, **kwargs)

    setattr(owner, name, property(wrapped) if isinstance(found, property) else wrapped)


def allow_checkpoint_classes() -> None:
    """Let torch load fairseq's checkpoints safely (fs 5610, 5603; torch >= 2.6 refuses unknown classes).

    Namespace: arguments. numpy: BLEU values of ``--eval-bleu`` runs, under numpy 1 and 2 names. omegaconf and
    the rest: a resume by several processes sends the whole state through ``torch.load``.
    """
    # numpy 1.26 has a numpy._core too, but not with everything in it.
    multiarray = sys.modules.get("numpy._core.multiarray") or sys.modules["numpy.core.multiarray"]
    numpy_functions = [
        (getattr(multiarray, name), f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ]
    numpy_dtypes = [type(np.dtype(code)) for code in ("f2", "f4", "f8", "i4", "i8", "u4", "u8", "?")]
    classes: list[Any] = (
        [argparse.Namespace, collections.defaultdict, typing.Any, dict, list, int]
        + [np.ndarray, np.dtype, *numpy_functions, *numpy_dtypes]
        + [omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.nodes.AnyNode]
        + [omegaconf.base.ContainerMetadata, omegaconf.base.Metadata]
        + [getattr(transformer_config, name) for name in ("TransformerConfig", "EncDecBaseConfig")]
        + [getattr(transformer_config, name) for name in ("DecoderConfig", "QuantNoiseConfig")]
        + [distributed_utils._TensorPlaceholder]
    )
    torch.serialization.add_safe_globals(classes)


def explain_bad_checkpoints() -> None:
    """Answer a file that is no checkpoint, or not a safe one, in one line instead of a traceback.

    Also lets a checkpoint of the published code find its model: it names fairseq's architectures.
    """

    def load(
        original: Callable[..., Any], path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any
    ) -> Any:
        if arg_overrides is not None and not isinstance(arg_overrides, dict):
            raise SurfaceFusionError(
                f"--model-overrides {arg_overrides} is no dictionary; give one, like \"{{'sf_gate': 0.9}}\""
            )
        try:
            return original(path, arg_overrides, *args, **kwargs)
        except FileNotFoundError:
            raise SurfaceFusionError(f"checkpoint {path} does not exist; check the path") from None
        except IsADirectoryError:
            raise SurfaceFusionError(f"checkpoint {path} is a folder; give a file in it") from None
        except SurfaceFusionError:
            raise
        except Exception as error:  # what torch raises on a strange file is anybody's guess
            unknown = re.search(r"GLOBAL (\S+)", str(error))
            if isinstance(error, pickle.UnpicklingError) and unknown is not None:
                raise SurfaceFusionError(
                    f"checkpoint {path} wants to run code of {unknown[1]}, which is not on the list of safe "
                    "classes; if you trust the file, load it with --trust-checkpoint (surface-fusion) or "
                    f"{TRUST_VARIABLE}=1 (fairseq commands)"
                ) from error
            raise SurfaceFusionError(
                f"checkpoint {path} is truncated or no fairseq checkpoint ({type(error).__name__}); give a "
                "file that fairseq-train wrote"
            ) from error

    def upgrade(original: Callable[..., Any], state: Any) -> Any:
        if not isinstance(state, dict) or "model" not in state:
            raise KeyError("model")  # for load, which knows the path
        args: Any = state.get("args")
        if hasattr(args, "sf_fuision_mode") and not str(args.arch).startswith("transformer_surface_fusion"):
            args.arch = "transformer_surface_fusion"
        return original(state)

    _wrap(checkpoint_utils, "load_checkpoint_to_cpu", load)
    _wrap(checkpoint_utils, "_upgrade_state_dict", upgrade)


def explain_missing_data() -> None:
    """Name the data folder, dictionary or data file that is missing or empty, in one line."""

    def setup(original: Callable[..., Any], cfg: Any, **kwargs: Any) -> Any:
        folders = utils.split_paths(str(getattr(cfg, "data", None) or ""))
        for folder in folders:
            if "://" not in folder and not os.path.isdir(folder):
                raise SurfaceFusionError(
                    f"data folder {folder} does not exist; give the folder that fairseq-preprocess wrote"
                )
        try:
            return original(cfg, **kwargs)
        except FileNotFoundError as error:
            raise SurfaceFusionError(
                f"data folder {folders[0]} has no {os.path.basename(str(error.filename))}; give the folder "
                "that fairseq-preprocess wrote, and its languages"
            ) from error

    def load(original: Callable[..., Any], path: str, *args: Any, **kwargs: Any) -> Any:
        if os.path.isfile(path + ".bin") and os.path.getsize(path + ".bin") == 0:
            raise SurfaceFusionError(
                f"data file {path}.bin holds no sentence; preprocess a text that is not empty"
            )
        return original(path, *args, **kwargs)

    _wrap(tasks, "setup_task", setup)
    _wrap(data_utils, "load_indexed_dataset", load)


def skip_overlong_sentences() -> None:
    """Skip and count what is longer than the model's positions (fs 1853, 2998, 2650).

    fairseq does so in training, but ends a validation or a generation at the first such sentence.
    """

    def keep_short(
        original: Callable[..., Any],
        self: Any,
        indices: Any,
        dataset: Any,
        max_positions: Any = None,
        ignore_invalid_inputs: bool = False,
    ) -> Any:
        kept = original(self, indices, dataset, max_positions, ignore_invalid_inputs=True)
        if len(kept) == 0 and getattr(dataset, "tgt", None) is not None:
            raise SurfaceFusionError(
                f"none of the {len(indices)} sentence pairs fits the model's positions {max_positions}; "
                "raise --max-source-positions and --max-target-positions or split the text"
            )
        return kept

    _wrap(FairseqTask, "filter_indices_by_size", keep_short)


def mend_data_in_parts() -> None:
    """Let ``train``, ``train1`` ... be read without ``--upsample-primary`` (fs 3644, whose default is -1)."""

    def init(original: Callable[..., None], self: Any, datasets: Any, sample_ratios: Any = 1) -> None:
        if not isinstance(sample_ratios, int):
            sample_ratios = [1 if ratio < 0 else ratio for ratio in sample_ratios]
        original(self, datasets, sample_ratios)

    _wrap(ConcatDataset, "__init__", init)


def mend_diverse_beam() -> None:
    """Let ``--diverse-beam-groups`` work on any batch: fairseq takes sentence ids for row numbers."""

    def step(
        original: Callable[..., Any],
        self: Any,
        step: int,
        lprobs: Any,
        scores: Any,
        prev_output_tokens: Any = None,
        original_batch_idxs: Any = None,
    ) -> Any:
        if original_batch_idxs is not None:
            if step == 0:
                self.batch_ids = original_batch_idxs
            original_batch_idxs = original_batch_idxs[:, None].eq(self.batch_ids[None, :]).int().argmax(dim=1)
        return original(self, step, lprobs, scores, prev_output_tokens, original_batch_idxs)

    _wrap(search.DiverseBeamSearch, "step", step)


def mend_ngram_blocking() -> None:
    """Let ``--no-repeat-ngram-size`` do something: fairseq takes the padding behind the last words for them.

    https://github.com/facebookresearch/fairseq/issues/5206
    """

    def block(
        original: Callable[..., Any], self: Any, tokens: Any, lprobs: Any, bsz: int, beam_size: int, step: int
    ) -> Any:
        return original(self, tokens[:, : step + 1], lprobs, bsz, beam_size, step)

    _wrap(NGramRepeatBlock, "_no_repeat_ngram", block)


def mend_replace_unk() -> None:
    """Let ``--replace-unk`` stand without a dictionary: fairseq takes its default ``"@@ "`` for a file."""

    def load(original: Callable[..., Any], replace_unk: str | None) -> Any:
        return original("" if replace_unk == "@@ " else replace_unk)

    _wrap(utils, "load_align_dict", load)


def mend_copies_of_tasks() -> None:
    """Let tasks, and so the hub's models, be copied and unpickled (``copy.deepcopy``; fairseq main of 2025).

    The copy of a task's state is asked for ``__setstate__`` before it has any attribute, and fairseq then
    looks for its attribute in that attribute, without end.
    """

    def get(original: Callable[..., Any], self: Any, name: str) -> Any:
        if "_factories" not in vars(self):
            raise AttributeError(f"{type(self).__name__} has no {name} yet")
        return original(self, name)

    _wrap(StatefulContainer, "__getattr__", get)


def allow_second_copy() -> None:
    """Take ``--user-dir`` for what it is when this package is imported already (fs 2081).

    Installed with pip and given as a folder as well, the same version is loaded once; another
    version is refused.
    """

    def import_user_module(original: Callable[..., Any], args: Any) -> Any:
        path = getattr(args, "user_dir", None)
        here = os.path.dirname(os.path.realpath(__file__))
        folder = os.path.realpath(path) if path else here
        if folder == here or os.path.basename(folder) != os.path.basename(here):
            same = path and folder == here and os.path.basename(os.path.abspath(path)) == "surface_fusion"
            return None if same else original(args)
        theirs, ours = (_version(os.path.join(f, "version.py")) for f in (folder, here))
        if theirs != ours:
            raise SurfaceFusionError(
                f"--user-dir {path} is surface-fusion {theirs}, but {ours} is imported already from {here}; "
                "uninstall that or leave --user-dir out"
            )
        logger.warning(
            f"--user-dir {path}: surface-fusion {ours} is imported already, from {here}; using that"
        )
        return None

    _wrap(utils, "import_user_module", import_user_module)


def _version(path: str) -> str:
    """The version that a copy of this package gives itself, without importing it."""
    if not os.path.isfile(path):
        return "of an unknown version"
    with open(path, encoding="utf-8") as file:
        found = re.search(r'__version__ = "(.+)"', file.read())
    return found[1] if found else "of an unknown version"


@functools.cache
def apply() -> None:
    """Apply everything above, once a process."""
    silence_harmless_warnings()
    allow_checkpoint_classes()
    explain_bad_checkpoints()
    explain_missing_data()
    _wrap(data_utils, "batch_by_size", keep_last_batch)
    _wrap(Trainer, "train_step", leave_out_dummies)
    _wrap(Trainer, "train_step", use_begun)
    _wrap(Trainer, "train_step", expect_step)
    _wrap(Trainer, "train_step", quick_trainer.announce_sums)  # outermost: it keeps batches as they came
    skip_overlong_sentences()
    mend_data_in_parts()
    mend_diverse_beam()
    mend_ngram_blocking()
    mend_replace_unk()
    mend_copies_of_tasks()
    allow_second_copy()
    _wrap(FairseqTask, "get_batch_iterator", resume.with_first_epochs_batches)
    _wrap(FairseqTask, "get_batch_iterator", make_batches_ahead)
    _wrap(Trainer, "load_checkpoint", resume.with_advice_on_resets)
    _wrap(EpochBatchIterator, "state_dict", resume.with_processes)
    _wrap(EpochBatchIterator, "load_state_dict", resume.for_these_processes)
    _wrap(BufferedIterator, "_create_consumer", fetch_while_waiting)
    _wrap(BufferedIterator, "__next__", remember_buffer)
    _wrap(Trainer, "set_num_updates", begin_next)
    _wrap(EpochBatchIterator, "first_batch", quick_trainer.keep_first_batch)
    _wrap(Trainer, "get_train_iterator", quick_trainer.keep_data_workers)
    _wrap(Trainer, "get_train_iterator", group_evenly)
    _wrap(Trainer, "get_train_iterator", remember_batches)
    _wrap(Trainer, "begin_epoch", try_longest_batch)
    _wrap(Trainer, "__init__", quick_trainer.build_quickly)
    _wrap(Trainer, "_build_optimizer", quick_trainer.build_quick_schedule)
    _wrap(data_utils, "collate_tokens", collate_tokens)
    _wrap(SequenceGenerator, "_generate", quick_search.generate)
    _wrap(SequenceGenerator, "finalize_hypos", quick_search.finalize_on_host)
    _wrap(Trainer, "_set_seed", quick_trainer.set_seed)
    _wrap(Trainer, "clip_grad_norm", begin_step)
    _wrap(Trainer, "_check_grad_norms", quick_trainer.compare_norms_later)
    _wrap(Trainer, "_fast_stat_sync_sum", quick_trainer.send_norm_along)
    _wrap(distributed_utils, "all_reduce_dict", quick_trainer.sum_over_processes)
