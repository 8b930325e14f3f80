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
from surface_fusion.errors import SurfaceFusionError, shorten


@dataclass(frozen=True)
class Range:
    """Finite numbers from *low* to *high*."""

    low: float = -math.inf
    high: float = math.inf
    excluded: tuple[float, ...] = ()  # bounds that are invalid
    special: tuple[float, ...] = ()  # further valid values
    fault: str = ""  # the message's text after the value; by default it states the range

    def __contains__(self, value: float) -> bool:
        inside = math.isfinite(value) and self.low <= value <= self.high and value not in self.excluded
        return inside or value in self.special

    def message(self, flag: str, value: float) -> str:
        """Return the error message for a *value* of *flag* that is out of range."""
        if self.fault:
            return f"{flag} {value} {self.fault}"
        above = "(" if self.low in self.excluded else "["
        below = ")" if self.high in self.excluded else "]"
        if math.isinf(self.low):
            valid = "a finite number"
        elif math.isinf(self.high):
            valid = f"a number {'above' if above == '(' else 'of at least'} {self.low:g}"
        else:
            valid = f"a number in {above}{self.low:g}, {self.high:g}{below}"
        return f"{flag} {value}: give " + " or ".join([valid, *(f"{number:g}" for number in self.special)])


LARGEST_SEED = 4_000_000_000  # fairseq adds the number of the epoch; numpy's seeds end at 2^32 - 1

_NAMES = {
    Range(0, 1, excluded=(1,), fault="is not a probability below 1"): """
        label_smoothing quant_noise_pq source_word_dropout ta_dropout target_word_dropout
    """,
    Range(0, 1): """
        activation_dropout adaptive_softmax_dropout attention_dropout block_momentum decoder_layerdrop dropout
        ema_decay encoder_layerdrop quant_noise_scalar relu_dropout slowmo_momentum
    """,
    Range(-100, 100): """
        lenpen lenpen_mt
    """,
    Range(1): """
        adaptive_softmax_cutoff all_gather_list_size amp_scale_window batch_size batch_size_valid beam
        bucket_cap_mb checkpoint_shard_count decoder_embed_dim decoder_ffn_embed_dim decoder_input_dim
        decoder_output_dim distributed_world_size ema_update_freq encoder_embed_dim encoder_ffn_embed_dim
        fp16_scale_window global_sync_iter localsgd_frequency log_interval max_source_positions
        max_target_positions max_tokens max_tokens_valid model_parallel_size nbest nprocs_per_node num_shards
        quant_noise_pq_block_size required_batch_size_multiple required_seq_len_multiple save_interval
        softmax_batch total_num_update update_freq validate_interval workers
    """,
    Range(0): """
        amp_batch_retries base_layers base_shuffle base_sublayers beam_mt buffer_size context_window
        curriculum data_buffer_size decoder_layers device_id distributed_num_procs distributed_rank
        diverse_beam_strength ema_start_update empty_cache_freq encoder_layers end_learning_rate
        fp16_scale_tolerance ignore_prefix_size iter_decode_max_iter iter_decode_with_beam lr max_epoch
        max_len_a max_len_a_mt max_len_b max_len_b_mt max_update max_valid_steps min_len min_params_to_wrap
        no_repeat_ngram_size num_batch_buckets num_workers padding_factor pipeline_chunks prefix_size
        save_interval_updates shard_id stop_time_hours thresholdsrc thresholdtgt validate_after_updates
        validate_interval_updates warmup_iterations warmup_updates weight_decay
    """,
    Range(0, special=(-1,)): """
        clip_norm distributed_port force_anneal heartbeat_timeout keep_best_checkpoints keep_interval_updates
        keep_interval_updates_pattern keep_last_epochs nwordssrc nwordstgt patience warmup_init_lr
    """,
    Range(0, excluded=(0,)): """
        adam_eps adaptive_softmax_factor amp_init_scale block_lr fp16_init_scale min_loss_scale temperature
        threshold_loss_scale
    """,
    Range(1, special=(-1,)): "diverse_beam_groups sampling_topk upsample_primary",
    Range(0, 1, excluded=(0,), special=(-1,)): "sampling_topp",
    Range(): """
        diversity_rate iter_decode_eos_penalty lm_weight min_lr power stop_min_lr unkpen
    """,
    Range(0, LARGEST_SEED, fault=f"is not a seed: give an integer from 0 to {LARGEST_SEED}"): """
        fixed_validation_seed seed
    """,
}
RANGES = {name: valid for valid, names in _NAMES.items() for name in names.split()}
"""Range by field name, such as ``label_smoothing``.

``model_checks.py`` checks values that depend on other flags.
"""


def check_ranges(values: Mapping[str, Any]) -> None:
    """Check the numbers among *values*, and in lists among them, against the ranges of their flags.

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
        raise SurfaceFusionError(f"{fault}{shorten(text, 100)!r} ({type(error).__name__})") from None
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
