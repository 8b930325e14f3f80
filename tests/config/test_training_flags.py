"""Published and today's flags of a training, on fairseq's own parser."""

import logging
import shlex
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.models import ARCH_CONFIG_REGISTRY
from fairseq.optim import build_optimizer
from fairseq.optim.lr_scheduler import build_lr_scheduler

from surface_fusion.errors import SurfaceFusionError
from tests.helpers.tiny import ARCH, USER_DIR, build, data_folder, parse

PUBLISHED = """
    --arch transformer_surface_fusion --share-all-embeddings --optimizer adam --adam-betas '(0.9, 0.98)'
    --clip-norm 0.0 --lr-scheduler inverse_sqrt --warmup-init-lr 1e-07 --warmup-updates 4000 --lr 0.0005
    --min-lr 1e-09 --dropout 0.3 --weight-decay 0.0 --criterion label_smoothed_cross_entropy
    --label-smoothing 0.1 --max-tokens 2048 --update-freq 1 --max-update 60000 --ddp-backend=no_c10d --fp16
    --seed 333 --surfacefusion att --sf-gate 0.8 --sf-mode hard
"""


def parse_published(*more: str, without: str = "") -> Any:
    flags = [flag for flag in shlex.split(PUBLISHED) if flag != without]
    argv = [data_folder(), "-s", "en", "-t", "ro", "--user-dir", USER_DIR, *flags, *more]
    return options.parse_args_and_arch(options.get_training_parser(), argv)


def test_the_published_command_line_parses_verbatim_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    args = parse_published()
    assert args.fp16 and args.seed == 333 and args.max_update == 60000 and args.max_tokens == 2048
    assert args.stop_min_lr == 1e-9 and not hasattr(args, "min_lr")
    assert (args.surfacefusion, args.sf_mode, args.sf_gate, args.sf_idx) == ("att", "hard", 0.8, None)
    assert (args.sf_ffn, args.sf_no_posedemb, args.sf_linear, args.sf_attention_heads) == (
        True,
        True,
        False,
        1,
    )
    assert (args.dropout, args.attention_dropout, args.activation_dropout) == (0.3, 0.1, 0.0)
    assert (args.encoder_layers, args.decoder_layers, args.encoder_embed_dim) == (6, 6, 512)
    cfg = convert_namespace_to_omegaconf(args)
    assert cfg.distributed_training.ddp_backend == "no_c10d"
    assert cfg.lr_scheduler.warmup_init_lr == 1e-7 and cfg.optimization.stop_min_lr == 1e-9
    assert list(cfg.optimization.lr) == [0.0005]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without a GPU")
def test_the_published_command_line_on_a_cpu_names_the_flag_to_omit() -> None:
    with pytest.raises(SurfaceFusionError) as error:
        parse_published()
    assert str(error.value) == (
        "--fp16 needs a CUDA GPU and none is visible; leave --fp16 out to train on the CPU"
    )
    assert parse_published(without="--fp16").stop_min_lr == 1e-9


@pytest.mark.parametrize("flag", ["--fp16", "--memory-efficient-fp16"])
def test_fp16_with_cpu_is_refused(flag: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(SurfaceFusionError, match="--fp16 needs a CUDA GPU and --cpu was given"):
        parse(flag)


# --min-lr


def test_min_lr_is_read_as_stop_min_lr_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="surface_fusion"):
        args = parse("--min-lr", "1e-09", "--lr-scheduler", "inverse_sqrt")
    assert args.stop_min_lr == 1e-9
    lines = [r.getMessage() for r in caplog.records if r.name.startswith("surface_fusion")]
    assert lines == ["--min-lr 1e-09 is read as --stop-min-lr, fairseq's current name of the flag"]


def test_without_min_lr_no_message_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, logger="surface_fusion"):
        args = parse("--lr-scheduler", "inverse_sqrt")
    assert args.stop_min_lr == -1.0 and not hasattr(args, "min_lr")
    assert not caplog.records
    assert parse("--stop-min-lr", "1e-5").stop_min_lr == 1e-5


@pytest.mark.parametrize("scheduler", ["fixed", "inverse_sqrt", "polynomial_decay", "reduce_lr_on_plateau"])
def test_min_lr_of_schedules_without_that_option(scheduler: str) -> None:
    needed = ("--total-num-update", "9") if scheduler == "polynomial_decay" else ()
    args = parse("--min-lr", "1e-09", "--lr-scheduler", scheduler, *needed)
    assert args.stop_min_lr == 1e-9 and not hasattr(args, "min_lr")


@pytest.mark.parametrize("scheduler", ["cosine", "step"])
@pytest.mark.parametrize("flags", [(), ("--min-lr", "1e-4")], ids=" ".join)
def test_min_lr_of_schedules_with_that_option(scheduler: str, flags: tuple[str, ...]) -> None:
    args = parse(
        *flags, "--lr-scheduler", scheduler, "--lr", "1e-3", "--optimizer", "adam", "--max-update", "10"
    )
    assert args.stop_min_lr == -1.0
    cfg = convert_namespace_to_omegaconf(args)
    assert cfg.lr_scheduler.min_lr == (1e-4 if flags else 0.0)
    assert cfg.optimization.stop_min_lr == -1.0


def test_cosine_schedule_ends_at_its_min_lr() -> None:
    flags = ("--min-lr", "1e-4", "--lr-scheduler", "cosine", "--lr", "1e-3", "--optimizer", "adam")
    args = parse(*flags, "--max-update", "10")
    cfg = convert_namespace_to_omegaconf(args)
    model, _ = build()
    optimizer = build_optimizer(cfg.optimizer, list(model.parameters()))
    scheduler = build_lr_scheduler(cfg.lr_scheduler, optimizer)
    rates = [scheduler.step_update(step) for step in range(11)]
    assert rates[0] == pytest.approx(1e-3) and rates[10] == pytest.approx(1e-4)


# --bf16


def test_bf16_does_not_look_for_a_tpu() -> None:
    args = parse("--bf16")
    assert args.bf16 is True and args.tpu is False
    assert convert_namespace_to_omegaconf(args).common.tpu is False


def test_memory_efficient_bf16() -> None:
    args = parse("--memory-efficient-bf16")
    assert args.bf16 is True and args.tpu is False


def test_an_available_tpu_stays_enabled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name, *_: object())
    assert parse("--bf16").tpu is True


def test_a_task_without_data_is_parsed() -> None:
    argv = ["--user-dir", USER_DIR, "-a", ARCH, "--task", "dummy_mt", "--cpu"]
    args = options.parse_args_and_arch(options.get_training_parser(), argv)
    assert args.arch == ARCH


# --optimizer flat_adam


def parse_on_gpu(*flags: str) -> Any:
    argv = [data_folder(), "-s", "en", "-t", "ro", "--user-dir", USER_DIR, "-a", ARCH, *flags]
    return options.parse_args_and_arch(options.get_training_parser(), argv)


@pytest.mark.parametrize("half", ["fp16", "bf16"])
@pytest.mark.slow
def test_flat_adam_in_half_precision_is_memory_efficient(half: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    other = {"fp16": "bf16", "bf16": "fp16"}[half]
    for flags, expected in (
        ((), set()),
        ((f"--{half}",), {half, f"memory_efficient_{half}"}),
        ((f"--memory-efficient-{half}",), {half, f"memory_efficient_{half}"}),
    ):
        cfg = convert_namespace_to_omegaconf(parse_on_gpu("--optimizer", "flat_adam", *flags))
        names = (half, other, f"memory_efficient_{half}", f"memory_efficient_{other}")
        assert {name for name in names if cfg.common[name]} == expected
    cfg = convert_namespace_to_omegaconf(parse_on_gpu("--optimizer", "adam", f"--{half}"))
    assert cfg.common[half] and not cfg.common[f"memory_efficient_{half}"]


def test_flags_of_flat_adam() -> None:
    flags = ("--adam-betas", "(0.9, 0.98)", "--weight-decay", "0.1", "--adam-eps", "1e-9", "--lr", "0.5")
    optimizer = convert_namespace_to_omegaconf(parse("--optimizer", "flat_adam", *flags)).optimizer
    assert optimizer == {
        "_name": "flat_adam",
        "adam_betas": "(0.9, 0.98)",
        "adam_eps": 1e-9,
        "weight_decay": 0.1,
        "lr": [0.5],
        "sf_plain": False,
    }
    assert convert_namespace_to_omegaconf(parse("--optimizer", "flat_adam", "--sf-plain")).optimizer.sf_plain


@pytest.mark.parametrize(
    "flags",
    [
        ("--use-bmuf",),
        ("--ddp-backend", "slowmo"),
        ("--ddp-backend", "fully_sharded"),
        ("--quant-noise-pq", "0.1"),
    ],
)
def test_flags_that_flat_adam_does_not_support_are_refused(flags: tuple[str, ...]) -> None:
    with pytest.raises(SurfaceFusionError, match=f"{' '.join(flags)} cannot be used .* use --optimizer adam"):
        parse("--optimizer", "flat_adam", *flags)
    parse("--optimizer", "adam", *flags)


# What is not a command line


def test_a_stored_configuration_is_not_changed(tmp_path: Path) -> None:
    """A checkpoint's arguments: its data folder may be gone, and it was trained in fp16."""
    args = parse()
    args._name = ARCH
    args.data, args.fp16, args.min_lr = str(tmp_path / "gone"), True, 1e-9
    ARCH_CONFIG_REGISTRY[ARCH](args)
    assert args.min_lr == 1e-9 and args.fp16
