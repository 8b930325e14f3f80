"""``surface-fusion train`` with few flags trains a model well; flags that are given stay as they are."""

import re
from argparse import Namespace

import pytest
import torch
from fairseq.models import ARCH_MODEL_REGISTRY

from surface_fusion.cli.training_defaults import learning_rate, missing_flags, with_training_defaults
from tests.helpers.small_training import SIZES
from tests.helpers.tiny import data_folder

SHORT = ("--cpu", "--num-workers", 0, "--max-update", 3)
LINE = "defaults for flags that were not given: "
ALL = {
    "--optimizer": "flat_adam",
    "--adam-betas": "(0.9, 0.98)",
    "--lr": "0.0005",
    "--lr-scheduler": "inverse_sqrt",
    "--warmup-updates": "4000",
    "--warmup-init-lr": "1e-07",
    "--clip-norm": "1.0",
    "--criterion": "fused_label_smoothed_cross_entropy",
    "--label-smoothing": "0.1",
    "--max-tokens": "4096",
}


def missing(*argv, **parsed):
    """The flags added to *argv*, whose values are *parsed*, by name."""
    fairseqs = {"optimizer": None, "lr_scheduler": "fixed", "lr": [0.25], "max_update": 0}
    args = Namespace(**{**fairseqs, "encoder_embed_dim": 512, **parsed})
    flags = missing_flags(argv, args)
    return dict(zip(flags[::2], flags[1::2], strict=True))


def test_all_flags():
    assert missing("DATA", "--save-dir", "DIR") == ALL


@pytest.mark.parametrize(
    "argv, parsed, left_out",
    [
        (["--lr", "1"], {"lr": [1]}, ["--lr"]),
        (["--lr=1"], {"lr": [1]}, ["--lr"]),
        (["--lr", "1,2"], {"lr": [1, 2]}, ["--lr", "--lr-scheduler", "--warmup-updates", "--warmup-init-lr"]),
        (["--force-anneal", "3"], {}, ["--lr-scheduler", "--warmup-updates", "--warmup-init-lr"]),
        (
            ["--lr-scheduler", "fixed"],
            {"lr_scheduler": "fixed"},
            ["--lr-scheduler", "--warmup-updates", "--warmup-init-lr"],
        ),
        (["--lr-scheduler", "inverse_sqrt"], {"lr_scheduler": "inverse_sqrt"}, ["--lr-scheduler"]),
        (["--warmup-updates", "9"], {}, ["--warmup-updates"]),
        (["--warmup-init-lr", "0"], {}, ["--warmup-init-lr"]),
        (["--optimizer", "adam"], {"optimizer": "adam"}, ["--optimizer"]),
        (["--optimizer=sgd"], {"optimizer": "sgd"}, ["--optimizer", "--adam-betas"]),
        (["--adam-betas", "(0.9, 0.999)"], {}, ["--adam-betas"]),
        (["--clip-norm", "0"], {}, ["--clip-norm"]),
        (["--criterion", "cross_entropy"], {}, ["--criterion", "--label-smoothing"]),
        (["--label-smoothing", "0.2"], {}, ["--label-smoothing"]),
        (["--max-tokens", "9"], {}, ["--max-tokens"]),
        (["--batch-size", "9"], {}, ["--max-tokens"]),
        (["--max-sentences=9"], {}, ["--max-tokens"]),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_flags_that_are_given(argv, parsed, left_out):
    assert missing(*argv, **parsed) == {flag: value for flag, value in ALL.items() if flag not in left_out}


@pytest.mark.parametrize("updates, warmup", [(0, 4000), (1, 1), (6000, 1000), (60000, 4000)])
def test_the_warm_up_of_a_short_training(updates, warmup):
    assert missing(max_update=updates)["--warmup-updates"] == str(warmup)


@pytest.mark.parametrize(
    "width, lr", [(1024, 5e-4), (512, 5e-4), (256, 1e-3), (128, 2e-3), (16, 2e-3), (0, 2e-3)]
)
def test_the_learning_rate_of_a_width(width, lr):
    assert learning_rate(width) == pytest.approx(lr)


@pytest.mark.parametrize(
    "argv, lr",
    [
        (("-a", "transformer_surface_fusion"), "0.0005"),
        (("-a", "transformer_surface_fusion_tiny", "--surfacefusion", "att"), "0.002"),
        (("-a", "transformer_surface_fusion_tiny", "--encoder-embed-dim", "256"), "0.001"),
        (("-a", "transformer_surface_fusion", "--encoder-embed-dim=192"), "0.001333"),
        (("-a", "transformer"), "0.0005"),
        (("--arch=transformer_tiny",), "0.002"),
    ],
)
def test_the_learning_rate_of_an_architecture(argv, lr):
    completed = with_training_defaults([*argv, "DATA"])
    assert completed[-len(argv) - 1 :] == [*argv, "DATA"]
    assert completed[completed.index("--lr") + 1] == lr


@pytest.mark.parametrize(
    "argv",
    [
        ("-a", "transformer_lm", "--task", "language_modeling", "DATA"),
        ("-a", "transformer", "--task=translation_lev", "DATA"),
        ("-a", "lstm", "DATA"),
    ],
)
def test_other_tasks_and_models_are_left_alone(argv):
    assert argv[1] in ARCH_MODEL_REGISTRY
    assert with_training_defaults(argv) == [*argv]


@pytest.mark.parametrize(
    "flags", [(), ("--sf-plain",), ("-a", "transformer")], ids=lambda flags: " ".join(flags)
)
def test_training(command, data, tmp_path, flags):
    result = command("train", data, *flags, *SIZES, *SHORT, "--save-dir", tmp_path / "s")
    assert (result.status, result.err) == (0, "")
    (line,) = [line for line in result.out.splitlines() if LINE in line]
    values = {**ALL, "--lr": "0.002", "--warmup-updates": "1", "--adam-betas": "'(0.9, 0.98)'"}
    assert line.endswith(LINE + " ".join(f"{flag} {value}" for flag, value in values.items()))
    state = torch.load(tmp_path / "s/checkpoint_last.pt", weights_only=False)
    assert state["optimizer_history"][-1]["num_updates"] == 3
    assert state["optimizer_history"][-1]["optimizer_name"] == "FlatAdam"


def test_a_resume_has_the_same_values(command, data, tmp_path):
    argv = ("train", data, *SIZES, *SHORT, "--save-dir", tmp_path, "--save-interval-updates", 1)
    first = command(*argv).out
    (tmp_path / "checkpoint_1_2.pt").replace(tmp_path / "checkpoint_last.pt")
    second = command(*argv).out
    assert "(epoch 2 @ 2 updates)" in second
    values = [re.findall(f"{LINE}.*", log) for log in (first, second)]
    assert len(values[0]) == 1 and values[0] == values[1]


def test_all_flags_given(command, tmp_path):
    argv = [data_folder(), *(argument for pair in ALL.items() for argument in pair)]
    assert with_training_defaults(["-a", "transformer", *argv]) == ["-a", "transformer", *argv]


def test_the_usage_line_of_the_help_trains(command, data, tmp_path):
    usage = command("train", "--help").out.splitlines()[0]
    words = usage.removeprefix("usage: surface-fusion ").removesuffix(" [flags]").split()
    places = {"DATA": data, "DIR": tmp_path / "dir"}
    result = command(*(places.get(word, word) for word in words), *SIZES, *SHORT)
    assert (result.status, result.err) == (0, "")
    assert (tmp_path / "dir/checkpoint_last.pt").exists()


def test_the_help_has_the_flags_of_the_defaults(command):
    help_ = command("train", "--help").out
    assert all(flag in help_ for flag in ALL)
