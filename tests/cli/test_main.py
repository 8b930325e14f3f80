"""Verbs, help, version and exit statuses.

Also tests ``cli/verbs.py``.
"""

import os
import runpy
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch.multiprocessing

import surface_fusion
from surface_fusion.cli import main as entry
from surface_fusion.cli import score
from tests.helpers import warm_processes

VERBS = (
    *("preprocess", "train", "generate", "interactive", "validate"),
    *("translate", "score", "average", "info", "analyse"),
)


def test_help_is_short_and_names_every_verb(command):
    result = command("--help")
    assert (result.status, result.err) == (0, "")
    assert result.out.count("\n") < 20 and max(map(len, result.out.splitlines())) <= 100
    for verb in VERBS:
        assert f"\n  {verb} " in result.out


def test_version(command):
    assert command("--version").out == f"surface-fusion {surface_fusion.__version__}\n"


@pytest.mark.parametrize(
    "argv, line",
    [
        ((), "surface-fusion: error: no verb given; choose one of preprocess, train, "),
        (("trian",), "surface-fusion: error: unknown verb trian; did you mean train?"),
        (("zzz", "--cpu"), "surface-fusion: error: unknown verb zzz; choose one of preprocess, train, "),
    ],
)
def test_unknown_verb_is_one_line(command, argv, line):
    result = command(*argv)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith(line) and result.err.count("\n") == 1


@pytest.mark.parametrize("verb", VERBS)
def test_help_of_each_verb(command, verb):
    result = command(verb, "--help")
    assert (result.status, result.err) == (0, "")
    assert f"usage: surface-fusion {verb} " in result.out
    assert ("--trust-checkpoint" in result.out) == (verb not in ("preprocess", "score"))


@pytest.mark.parametrize("arch", [(), ("-a", "transformer_surface_fusion_tiny"), ("--arch=transformer",)])
def test_help_of_train_shows_the_flags_of_model_task_and_optimizer(command, arch):
    help_ = command("train", *arch, "--help", "--optimizer", "adam").out
    assert "--encoder-layers" in help_ and "--source-lang" in help_ and "--adam-betas" in help_
    assert ("--sf-gate SF_GATE" in help_) == (arch != ("--arch=transformer",))


@pytest.mark.parametrize("verb", ["generate", "interactive"])
def test_help_of_translating_verbs_shows_the_flags_of_the_task(command, verb):
    help_ = command(verb, "-h").out
    assert "--beam" in help_ and "--source-lang" in help_


def test_interruption_is_one_line_and_status_130(command, monkeypatch):
    def interrupt(argv):
        raise KeyboardInterrupt

    monkeypatch.setattr(score, "run", interrupt)
    result = command("score")
    assert (result.status, result.err) == (130, "surface-fusion score: interrupted\n")


@pytest.fixture
def broken(monkeypatch):
    """``broken(error)`` lets the verb score raise an error."""

    def install(error):
        def fail(argv):
            raise error

        monkeypatch.setattr(score, "run", fail)

    return install


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder of temporary files."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def test_a_bug_is_one_line_and_its_traceback_is_in_a_file(command, broken, temporary):
    broken(ZeroDivisionError("a\nbug"))
    result = command("score")
    (path,) = temporary.glob("surface-fusion-*.traceback")
    line = f"unexpected error: ZeroDivisionError: a bug; the traceback is in {path}"
    assert (result.status, result.out, result.err) == (1, "", f"surface-fusion score: error: {line}\n")
    trace = path.read_text(encoding="utf-8")
    assert trace.startswith("Traceback") and "in fail" in trace and trace.endswith("a\nbug\n")


def test_a_bug_without_a_folder_for_its_traceback(command, broken, temporary):
    broken(ZeroDivisionError("a bug"))
    temporary.rmdir()
    result = command("score")
    assert result.status == 1 and result.err.startswith("Traceback")
    assert result.err.splitlines()[-1].endswith("could not be written to a file: No such file or directory")


def test_a_bug_in_a_child_process(command, broken, temporary):
    text = "\n\n-- Process 1 terminated with the following error:\nTraceback ...\nKeyError: 'model'\n"
    broken(torch.multiprocessing.ProcessRaisedException(text, 1, 12345))
    result = command("score")
    start = "surface-fusion score: error: unexpected error: KeyError: 'model'; the traceback is in "
    assert result.status == 1 and result.err.startswith(start)
    assert "-- Process 1 terminated" in next(temporary.iterdir()).read_text()


@pytest.mark.parametrize(
    "code, status, err", [(None, 0, ""), (3, 3, ""), ("no", 2, "surface-fusion score: error: no\n")]
)
def test_exits_of_a_verb(command, broken, code, status, err):
    broken(SystemExit(code))
    result = command("score")
    assert (result.status, result.err) == (status, err)


def test_verbs_and_summaries_agree():
    assert tuple(entry.SUMMARIES) == VERBS


@pytest.mark.parametrize("argv", ["--version", "--help", "trian", "score --help"])
def test_help_version_and_a_misspelt_verb_import_neither_torch_nor_fairseq(argv):
    code = f"""
import sys
from surface_fusion.cli.main import main

main({argv.split()})
sys.exit(str([name for name in ("torch", "fairseq", "omegaconf") if name in sys.modules]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stderr.splitlines()[-1] == "[]"


def test_the_installed_script_prints_the_version():
    script = str(Path(sys.executable).with_name("surface-fusion"))
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout == f"surface-fusion {surface_fusion.__version__}\n"


def test_python_m_surface_fusion_runs_a_verb(monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["", "average"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_module("surface_fusion", run_name="__main__")
    printed = capsys.readouterr()
    assert (stop.value.code, printed.out) == (2, "")
    assert printed.err.startswith("surface-fusion average: error: ") and printed.err.count("\n") == 1


def test_a_reader_that_stops_early_causes_no_traceback(tmp_path):
    (read, write), log = os.pipe(), tmp_path / "log"
    with log.open("w") as errors:
        process = warm_processes.start(
            warm_processes.SURFACE_FUSION, "train", "--help", stdout=write, stderr=errors.fileno()
        )
    os.close(write)
    os.read(read, 1)
    os.close(read)
    warm_processes.wait(process, 60)
    assert "Traceback" not in log.read_text()
