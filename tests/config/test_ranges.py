"""Each numeric flag has a range; what lies outside is refused in one line, wherever it comes from."""

import math
from dataclasses import fields, is_dataclass
from typing import Any

import pytest
from fairseq import options
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterionConfig
from fairseq.data.data_utils import numpy_seed
from fairseq.dataclass import configs
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim.lr_scheduler import LR_SCHEDULER_DATACLASS_REGISTRY
from fairseq.tasks.translation import TranslationConfig
from omegaconf import OmegaConf

from surface_fusion.config.flags import SECTIONS, SurfaceFusionConfig
from surface_fusion.config.ranges import (
    RANGES,
    check_config,
    check_generation,
    check_model_overrides,
    check_ranges,
)
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.optim.flat_adam import FlatAdamConfig
from tests.helpers.tiny import SIZES, build, data_folder, parse

CHECKED_WITH_OTHERS = {
    *(
        "sf_gate",
        "sf_softmax_tau",
        "sf_idx",
        "sf_attention_heads",
        "extra_encoder_layers",
        "dwatt_bottleneck",
    ),
    *("dwatt_d_pos", "routing_capsules", "routing_iterations"),
    *("encoder_attention_heads", "decoder_attention_heads"),
}
LISTS_OF_THEIR_OWN = {"encoder_layers_to_keep", "decoder_layers_to_keep", "adam_betas"}


def numeric_flags() -> dict[str, Any]:
    """Names and defaults of all numbers in the dataclasses of a training or generation of ours."""
    kinds = [getattr(configs, name) for name in dir(configs)]
    kinds += [LabelSmoothedCrossEntropyCriterionConfig, TranslationConfig, FlatAdamConfig]
    kinds += [
        kind for kind in LR_SCHEDULER_DATACLASS_REGISTRY.values() if kind.__name__.startswith(("Inv", "Poly"))
    ]
    found: dict[str, Any] = {}
    for kind in kinds:
        if isinstance(kind, type) and is_dataclass(kind) and kind is not configs.FairseqConfig:
            found.update(_numbers(kind))
    found.update(_numbers(SurfaceFusionConfig))
    for section in SECTIONS:
        part = _numbers(type(getattr(SurfaceFusionConfig(), section)))
        found.update({f"{section}_{name}": default for name, default in part.items()})
    return found


def _numbers(kind: Any) -> dict[str, Any]:
    plain = {int, float, int | None, float | None, list[int], list[float], list[int] | None}
    types = [*plain, configs.Optional[int], configs.Optional[float], configs.List[int], configs.List[float]]
    return {f.name: f.default for f in fields(kind) if f.type in types}


def test_every_number_has_a_range() -> None:
    missing = numeric_flags().keys() - RANGES.keys() - CHECKED_WITH_OTHERS - LISTS_OF_THEIR_OWN
    assert not missing


def test_every_default_is_in_its_range() -> None:
    for name, default in numeric_flags().items():
        if name in RANGES and isinstance(default, (int, float)):
            assert default in RANGES[name], name
    args = vars(options.get_preprocessing_parser().parse_args([]))
    check_ranges(args)
    for parser in (options.get_generation_parser, options.get_interactive_generation_parser):
        namespace = options.parse_args_and_arch(parser(), [data_folder(), "--path", "x"])
        check_config(convert_namespace_to_omegaconf(namespace))


@pytest.mark.parametrize("name", RANGES)
def test_values_outside_the_range_are_refused(name: str) -> None:
    valid = RANGES[name]
    outside = [math.nan, math.inf, -math.inf]
    outside += [valid.low - 1] if math.isfinite(valid.low) else []
    outside += [valid.high + 1] if math.isfinite(valid.high) else []
    outside += valid.excluded
    for value in outside:
        if value in valid.special:
            continue
        with pytest.raises(SurfaceFusionError) as error:
            check_ranges({name: value})
        assert str(error.value).startswith(f"--{name.replace('_', '-')} {value}")
        assert "\n" not in str(error.value)
        with pytest.raises(SurfaceFusionError):
            check_ranges({name: [value]})


@pytest.mark.parametrize("name", RANGES)
def test_values_inside_the_range_are_accepted(name: str) -> None:
    valid = RANGES[name]
    inside = [*valid.special, 1 if 1 in valid else 0.5]
    inside += [x for x in (valid.low, valid.high) if math.isfinite(x) and x not in valid.excluded]
    for value in inside:
        assert value in valid
        check_ranges({name: value})
    check_ranges({name: None})
    check_ranges({name: "text"})


@pytest.mark.parametrize(
    "name, value",
    [
        ("quant_noise_scalar", 1),  # quantisation-aware training
        ("decoder_layerdrop", 1),
        ("dropout", 1),
        ("clip_norm", -1),
        ("heartbeat_timeout", 0),
        ("padding_factor", 0),
        ("max_update", 0),
        ("patience", -1),
    ],
)
def test_values_that_fairseq_reads_as_off_or_always_are_accepted(name: str, value: float) -> None:
    assert value in RANGES[name]
    check_ranges({name: value})


def test_seeds_are_small_enough_to_add_the_epoch() -> None:
    """Which fairseq adds to the seed that it gives to numpy."""
    with numpy_seed(int(RANGES["seed"].high) + 10**6):
        pass
    with pytest.raises(SurfaceFusionError, match="--seed 4294967295 is not a seed"):
        check_ranges({"seed": 2**32 - 1})


FLAGS = [
    ("--label-smoothing", "1.5"),
    ("--clip-norm", "nan"),
    ("--encoder-layers", "-1"),
    ("--encoder-layerdrop", "2"),
    ("--batch-size", "0"),
    ("--update-freq", "0"),
    ("--update-freq", "1,-1"),
    ("--encoder-embed-dim", "0"),
    ("--encoder-ffn-embed-dim", "-1"),
    ("--dropout", "1.5"),
    ("--dropout", "-0.1"),
    ("--dropout", "nan"),
    ("--seed", "-1"),
    ("--seed", str(2**40)),
    ("--num-workers", "-1"),
    ("--lr", "-1"),
]


@pytest.mark.parametrize("flags", FLAGS, ids="=".join)
def test_out_of_range_flags_of_a_training_are_refused(flags: tuple[str, str]) -> None:
    given = (f"{flags[0]}={flags[1]}", "--criterion", "label_smoothed_cross_entropy")
    with pytest.raises(SurfaceFusionError, match=flags[0]):
        parse(*given)


@pytest.mark.parametrize("dim", ["2", "3"])
def test_sinusoidal_positions_need_a_minimal_width(dim: str) -> None:
    heads = ("--encoder-attention-heads", "1", "--decoder-attention-heads", "1")
    narrow = ("--encoder-embed-dim", dim, *heads)
    with pytest.raises(SurfaceFusionError, match=f"--encoder-embed-dim {dim} is too small"):
        build(*narrow)
    build(*narrow, "--encoder-learned-pos", "--decoder-learned-pos")


def test_an_empty_list_is_refused():
    with pytest.raises(SurfaceFusionError, match="--update-freq has no value; give at least one number"):
        check_ranges({"update_freq": []})


@pytest.mark.parametrize("text", ["{", "word", "[1]", "0", ""])
def test_overrides_that_are_no_dictionary_are_refused(text):
    with pytest.raises(SurfaceFusionError, match="--model-overrides is not a Python dictionary: "):
        check_model_overrides({"model_overrides": text})


def test_overrides_that_are_a_dictionary_are_accepted():
    check_model_overrides({})
    check_model_overrides({"model_overrides": "{'sf_gate': 0.9}"})


@pytest.mark.parametrize(
    "values, text",
    [
        ({"nbest": 5, "beam": 2}, "--nbest 5 is more than --beam 2; raise --beam"),
        ({"min_len": 20, "max_len_a": 0, "max_len_b": 10}, "--min-len 20 is more than --max-len-b 10"),
        ({"shard_id": 2, "num_shards": 2}, "--shard-id 2: give a number below --num-shards 2"),
    ],
)
def test_contradictory_settings_of_generation_are_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(SurfaceFusionError, match=text):
        check_generation(values)
    check_generation({"nbest": 2, "beam": 2, "min_len": 20, "max_len_a": 1.2, "max_len_b": 10})


def test_a_schedule_without_warm_up_is_refused() -> None:
    flags = ("--optimizer", "adam", "--lr-scheduler", "inverse_sqrt", "--warmup-updates", "0")
    cfg = convert_namespace_to_omegaconf(parse(*SIZES, *flags))
    with pytest.raises(SurfaceFusionError, match="--warmup-updates 0 cannot be used with"):
        check_config(cfg)


def test_out_of_range_values_in_yaml_and_overrides_are_refused() -> None:
    yaml = OmegaConf.create({"_name": "transformer_surface_fusion", "dropout": 1.5})
    with pytest.raises(SurfaceFusionError, match=r"--dropout 1\.5: give a number in \[0, 1\]"):
        SurfaceFusionConfig.from_namespace(yaml)
    args = parse(*SIZES)
    args.attention_dropout = "much"  # as --model-overrides can
    with pytest.raises(SurfaceFusionError, match="--attention-dropout 'much': give a number"):
        SurfaceFusionConfig.from_namespace(args)
