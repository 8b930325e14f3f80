"""What is logged, where, and what is left out; output that cannot be written (``cli/streams.py``)."""

import os
import subprocess
import sys

import pytest
import torch

from surface_fusion.cli.main import main
from tests.helpers import warm_processes
from tests.helpers.small_training import PREPROCESS, TEXT, TRAIN

SHORT = "configuration not shown; add --show-config to see it"


def process(*argv, entry_point=warm_processes.SURFACE_FUSION, stdout=None, status=0):
    """A process of its own, where warnings show as a user would see them."""
    done = warm_processes.run(entry_point, *argv, stdout=stdout)
    assert done.returncode == status, done.stderr
    return done


def longest_line(text):
    return max(map(len, text.splitlines()))


def test_a_training_is_quiet_but_for_its_log(data, tmp_path):
    done = process("train", data, *TRAIN, "--save-dir", tmp_path, "--max-update", 2, "--no-save")
    assert done.stderr == ""
    assert done.stdout.count(SHORT) == 1
    assert longest_line(done.stdout) < 1000
    assert "| INFO | fairseq_cli.train | begin validation on" in done.stdout


def main_with_two_gpus():
    """What fairseq is told."""
    torch.cuda.device_count = lambda: 2
    return main()


def test_spawned_processes_log_as_one(data, tmp_path):
    """fairseq spawns a process for each GPU."""
    gloo = ("--distributed-world-size", 2, "--distributed-backend", "gloo", "--ddp-backend", "no_c10d")
    argv = ("train", data, *TRAIN, *gloo, "--save-dir", tmp_path, "--max-update", 2, "--no-save")
    done = process(*argv, entry_point="tests.cli.test_log:main_with_two_gpus")
    assert done.stdout.count(SHORT) == 1 and longest_line(done.stdout) < 1000
    assert done.stdout.count("begin validation on") == 1
    assert "Traceback" not in done.stderr


@pytest.mark.slow
def test_translations_are_kept_apart_from_the_log(data, checkpoint):
    done = process("generate", data, "--path", checkpoint, "--cpu", "--num-workers", 0, "--max-tokens", 400)
    lines = done.stdout.splitlines()
    assert lines[-1].startswith("Generate test with beam=5: BLEU4 = ")
    assert {line[:2] for line in lines[:-1]} == {"S-", "T-", "H-", "D-", "P-"}
    assert [line for line in done.stderr.splitlines() if " | INFO | " not in line] == []
    assert done.stderr.count(SHORT) == 1 and longest_line(done.stderr) < 1000


@pytest.mark.parametrize("verb", ["preprocess", "train", "generate", "interactive", "validate"])
@pytest.mark.slow
def test_show_config_shows_it_whole(command, data, checkpoint, tmp_path, verb):
    argv = {
        "preprocess": (*PREPROCESS, "--destdir", tmp_path / "bin", "--dict-only"),
        "train": (data, *TRAIN, "--save-dir", tmp_path, "--max-update", 1, "--no-save"),
        "generate": (data, "--path", checkpoint, "--cpu", "--num-workers", 0, "--max-len-b", 20),
        "interactive": (
            data,
            "--path",
            checkpoint,
            "--cpu",
            "--num-workers",
            0,
            "--max-len-b",
            20,
            "--input",
            TEXT / "valid.en",
        ),
        "validate": (data, "--path", checkpoint, "--cpu", "--num-workers", 0, "--max-tokens", 400),
    }[verb]
    whole = command(verb, *argv, "--show-config")
    assert whole.status == 0
    log = whole.out + whole.err
    assert SHORT not in log and longest_line(log) > 1000
    if verb == "preprocess":
        argv = tuple(tmp_path / "bin2" if arg == tmp_path / "bin" else arg for arg in argv)
    short = command(verb, *argv)
    assert short.status == 0
    log = short.out + short.err
    assert SHORT in log and longest_line(log) < 1000


@pytest.mark.slow
def test_interactive_does_not_log_every_sentence(command, data, checkpoint):
    result = command(
        "interactive",
        data,
        "--path",
        checkpoint,
        "--cpu",
        "--num-workers",
        0,
        "--max-len-b",
        20,
        "--input",
        TEXT / "valid.en",
    )
    assert result.out.count("\nH-") == 40
    assert result.err.count("\n") < 20


def test_importing_the_package_leaves_the_root_logger_alone():
    check = "import logging, surface_fusion; print(logging.getLogger().handlers, logging.getLogger().level)"
    done = subprocess.run([sys.executable, "-c", check], capture_output=True, text=True)
    assert (done.stdout, done.stderr) == (f"[] {30}\n", "")


@pytest.mark.parametrize("verb", ["info", "generate"])
@pytest.mark.slow
def test_output_to_a_full_disk_is_an_error(data, checkpoint, verb):
    flags = ("--path", checkpoint, "--cpu", "--num-workers", 0, "--max-tokens", 400)
    argv = (checkpoint,) if verb == "info" else (data, *flags)
    with open("/dev/full", "w") as full:
        done = process(verb, *argv, stdout=full.fileno(), status=2)
    said = [line for line in done.stderr.splitlines() if " | INFO | " not in line]
    assert said == [f"surface-fusion {verb}: error: the output cannot be written: No space left on device"]


def test_a_log_on_a_full_disk_does_not_end_the_training(data, tmp_path):
    with open("/dev/full", "w") as full:
        flags = ("--save-dir", tmp_path, "--max-update", 2, "--disable-validation")
        done = process("train", data, *TRAIN, *flags, stdout=full.fileno())
    assert done.stderr == "surface-fusion: the log cannot be written: No space left on device\n"
    assert (tmp_path / "checkpoint_last.pt").exists()


def test_a_training_ends_when_the_reader_of_its_log_ends(data, tmp_path):
    read, write = os.pipe()
    os.close(read)
    flags = ("--save-dir", tmp_path, "--max-update", 2)
    assert process("train", data, *TRAIN, *flags, stdout=write, status=141).stderr == ""
    os.close(write)
