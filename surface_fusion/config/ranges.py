"""Valid range of each numeric flag, and checks of flags that depend on each other.

The checks run before training or generation starts. fairseq accepts any number and fails later, for example
by a division by zero or a loss of NaN.
"""

import ast
import importlib.util
import math
from argparse import Namespace
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from omegaconf import DictConfig, OmegaConf

from surface_fusion.config.validation import check_best_metric, eval_bleu_args
from surface_fusion.errors import SurfaceFusionError


@dataclass(frozen=True)
class Range:
    """Finite numbers from *low* to *high*.

    Attributes:
        low_excluded: whether *low* itself is invalid.
        high_excluded: whether *high* itself is invalid.
        special: further valid values.
        fault: the message's text after the value; by default it states the range.
    """

    low: float = -math.inf
    high: float = math.inf
    low_excluded: bool = False
    high_excluded: bool = False
    special: tuple[float, ...] = ()
    fault: str = ""

    def __contains__(self, value: float) -> bool:
        if value in self.special:
            return True
        above = value > self.low if self.low_excluded else value >= self.low
        below = value < self.high if self.high_excluded else value <= self.high
        return math.isfinite(value) and above and below

    def message(self, flag: str, value: float) -> str:
        """Return the error message for a *value* of *flag* that is out of range."""
        if self.fault:
            return f"{flag} {value} {self.fault}"
        if math.isinf(self.low) and math.isinf(self.high):
            valid = "a finite number"
        elif math.isinf(self.high):
            bound = "above" if self.low_excluded else "of at least"
            valid = f"a number {bound} {self.low:g}"
        else:
            valid = f"a number in {'(' if self.low_excluded else '['}{self.low:g}, {self.high:g}"
            valid += ")" if self.high_excluded else "]"
        return f"{flag} {value}: give " + " or ".join([valid, *(f"{number:g}" for number in self.special)])


PROBABILITY = Range(0, 1, high_excluded=True, fault="is not a probability below 1")
SHARE = Range(0, 1)
COUNT = Range(1)
COUNT_OR_OFF = Range(0, special=(-1,))
POSITIVE = Range(0, low_excluded=True)
NOT_NEGATIVE = Range(0)
FINITE = Range()
SEED = Range(0, 4_000_000_000, fault="is not a seed: give an integer from 0 to 4000000000")
"""numpy's seeds end at 2^32 - 1; fairseq adds the number of the epoch to the seed."""

_GROUPS: tuple[tuple[Range, str], ...] = (
    (PROBABILITY, "ta_dropout source_word_dropout target_word_dropout quant_noise_pq label_smoothing"),
    (
        SHARE,
        """
        dropout attention_dropout activation_dropout relu_dropout adaptive_softmax_dropout
        encoder_layerdrop decoder_layerdrop slowmo_momentum ema_decay block_momentum quant_noise_scalar""",
    ),
    (
        COUNT,
        """
        encoder_embed_dim decoder_embed_dim encoder_ffn_embed_dim decoder_ffn_embed_dim
        decoder_input_dim decoder_output_dim
        max_source_positions max_target_positions quant_noise_pq_block_size adaptive_softmax_cutoff
        max_tokens batch_size max_tokens_valid batch_size_valid required_batch_size_multiple
        required_seq_len_multiple update_freq validate_interval log_interval save_interval
        num_shards distributed_world_size nprocs_per_node
        all_gather_list_size model_parallel_size bucket_cap_mb localsgd_frequency checkpoint_shard_count
        fp16_scale_window amp_scale_window beam nbest
        ema_update_freq global_sync_iter workers softmax_batch
        total_num_update""",
    ),
    (
        NOT_NEGATIVE,
        """
        encoder_layers decoder_layers base_layers base_sublayers base_shuffle
        min_params_to_wrap num_workers data_buffer_size validate_interval_updates validate_after_updates
        max_valid_steps curriculum shard_id max_epoch max_update save_interval_updates
        warmup_updates ignore_prefix_size num_batch_buckets empty_cache_freq amp_batch_retries
        distributed_rank distributed_num_procs pipeline_chunks
        beam_mt max_len_b max_len_b_mt min_len prefix_size no_repeat_ngram_size buffer_size
        iter_decode_max_iter iter_decode_with_beam
        ema_start_update warmup_iterations device_id context_window thresholdsrc thresholdtgt
        padding_factor
        lr end_learning_rate weight_decay stop_time_hours
        fp16_scale_tolerance max_len_a max_len_a_mt diverse_beam_strength""",
    ),
    (
        COUNT_OR_OFF,
        """
        keep_interval_updates keep_interval_updates_pattern keep_last_epochs keep_best_checkpoints patience
        distributed_port force_anneal warmup_init_lr nwordssrc nwordstgt""",
    ),
    (
        POSITIVE,
        "adaptive_softmax_factor fp16_init_scale amp_init_scale min_loss_scale threshold_loss_scale "
        "adam_eps temperature block_lr",
    ),
    (Range(0, special=(-1,)), "heartbeat_timeout clip_norm"),
    (Range(1, special=(-1,)), "sampling_topk diverse_beam_groups upsample_primary"),
    (Range(0, 1, low_excluded=True, special=(-1,)), "sampling_topp"),
    (
        FINITE,
        """
        lenpen lenpen_mt unkpen diversity_rate iter_decode_eos_penalty stop_min_lr min_lr power lm_weight""",
    ),
    (SEED, "seed fixed_validation_seed"),
)
RANGES: dict[str, Range] = {name: valid for valid, names in _GROUPS for name in names.split()}
"""Range by field name, such as ``label_smoothing``.

``model_checks.py`` checks values that depend on other flags.
"""


def check_ranges(values: Mapping[str, Any]) -> None:
    """Check numbers against the ranges of their flags.

    Args:
        values: values by name; lists are checked element by element.

    Raises:
        SurfaceFusionError: a number is out of range, or a list is empty; names the flag and the range.
    """
    for name, value in values.items():
        valid = RANGES.get(name)
        if valid is None:
            continue
        numbers = value if isinstance(value, (list, tuple)) else [value]
        if not numbers:
            raise SurfaceFusionError(f"--{name.replace('_', '-')} has no value; give at least one number")
        for number in numbers:
            if isinstance(number, (int, float)) and not isinstance(number, bool) and number not in valid:
                raise SurfaceFusionError(valid.message(f"--{name.replace('_', '-')}", number))


def check_generation(values: Mapping[str, Any]) -> None:
    """Check generation settings that depend on each other.

    Raises:
        SurfaceFusionError: two settings contradict each other; names both flags and values.
    """
    nbest, beam = values.get("nbest", 1), values.get("beam", 5)
    if nbest > beam:
        raise SurfaceFusionError(f"--nbest {nbest} is more than --beam {beam}; raise --beam")
    shortest, longest = values.get("min_len", 1), values.get("max_len_b", 200)
    if values.get("max_len_a", 0) == 0 and shortest > longest:
        raise SurfaceFusionError(f"--min-len {shortest} is more than --max-len-b {longest}; lower it")
    shard, shards = values.get("shard_id", 0), values.get("num_shards", 1)
    if shard >= shards:
        raise SurfaceFusionError(f"--shard-id {shard}: give a number below --num-shards {shards}")


def check_model_overrides(values: Mapping[str, Any]) -> None:
    """Check that ``--model-overrides``, if it is in *values*, is a dictionary.

    Raises:
        SurfaceFusionError: it is not.
    """
    text = values.get("model_overrides", "{}")
    fault = "--model-overrides is not a Python dictionary: "
    try:
        overrides = ast.literal_eval(text)
    except (SyntaxError, ValueError, TypeError, MemoryError, RecursionError) as error:
        raise SurfaceFusionError(f"{fault}{error}") from None
    if not isinstance(overrides, dict):
        raise SurfaceFusionError(f"{fault}{text}")


def check_config(cfg: DictConfig) -> None:
    """Check fairseq's complete configuration for values out of range and contradictions.

    The model section is checked by :func:`surface_fusion.config.model_checks.check_model`.

    Raises:
        SurfaceFusionError: a value is invalid.
    """
    sections = {name: _section(cfg, name) for name in map(str, cfg) if name != "model"}
    bleu = eval_bleu_args(sections.get("task", {}))
    for values in (*sections.values(), bleu):
        check_ranges(values)
    check_generation(bleu)
    check_best_metric(sections)
    check_model_overrides(sections.get("common_eval", {}))
    if sections.get("common", {}).get("tpu") and importlib.util.find_spec("torch_xla") is None:
        raise SurfaceFusionError("--tpu, which fairseq sets with --bf16 too, needs torch_xla; leave it out")
    check_generation({**sections.get("dataset", {}), **sections.get("generation", {})})
    schedule = sections.get("lr_scheduler", {})
    if schedule.get("_name") == "inverse_sqrt" and schedule.get("warmup_updates", 1) < 1:
        raise SurfaceFusionError(
            "--warmup-updates 0 cannot be used with --lr-scheduler inverse_sqrt, which divides by it; give 1 "
            "or more"
        )


def _section(cfg: DictConfig, name: str) -> dict[str, Any]:
    """Return the values of a section of *cfg*; missing ones are the text ``???``."""
    section = None if OmegaConf.is_missing(cfg, name) else cfg[name]
    if isinstance(section, Namespace):
        return vars(section)
    values: Any = OmegaConf.to_container(section, resolve=True) if OmegaConf.is_dict(section) else {}
    return dict(values)
