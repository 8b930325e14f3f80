"""No value of any flag ends a verb with a traceback: a wrong value is one line and status 2.

Tests ``cli/main.py`` and ``cli/user_errors.py`` with the flags of all verbs, fairseq's among them. A draw is
a command line with one flag in addition, whose value is wrong for the flag's kind.
"""

import argparse
import contextlib
import io
import logging
import os
import random
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import fairseq_cli.train
import pytest
import sentencepiece
import torch
from fairseq.tasks import FairseqTask

from surface_fusion.cli.main import main
from surface_fusion.cli.verbs import SUMMARIES
from tests.helpers.small_training import PREPROCESS, SIZES, TEXT

NUMBERS = ("word", "-1", "0", "1e30", "nan", "")
TEXTS = ("", "word", "nowhere/missing", "-1", "{", "[1", "nan")
LISTS = ("word", "", "[1", "(0.9", "{", "nan", "-1", "0", "1e30", "1,word")
SECONDS = 60

SEED = 1
DRAWS = {"train": 40, "generate": 20, "interactive": 20, "validate": 20, "analyse": 5}
"""Numbers of flags drawn here for the large parsers; :func:`draws` without a limit draws every flag."""


class TooLong(BaseException):
    """A command did not end."""


@dataclass
class Place:
    """The files that the commands read; they write into the current folder."""

    data: Path
    checkpoint: Path

    def argv(self, verb: str) -> list[str]:
        """A command line of *verb* that succeeds; the flag to draw is added to it."""
        loaded = ("--path", self.checkpoint, "--cpu", "--num-workers", 0, "--max-tokens", 400)
        argv: tuple[Any, ...] = {
            "preprocess": (*PREPROCESS, "--destdir", "bin"),
            "train": (self.data, *SIZES, "--cpu", "--num-workers", 0, "--save-dir", "save"),
            "generate": (self.data, *loaded, "--gen-subset", "valid", "--max-len-b", 5),
            "interactive": (self.data, *loaded, "--max-len-b", 5),
            "validate": (self.data, *loaded),
            "translate": (self.checkpoint.parent, "--checkpoint", self.checkpoint.name, "--cpu"),
            "score": ("--hyp", TEXT / "test.en", "--ref", TEXT / "test.ro"),
            "average": (self.checkpoint, "-o", "mean.pt"),
            "info": (self.checkpoint,),
            "analyse": ("embeddings", self.checkpoint, self.data, "-o", "drawn"),
        }[verb]
        return [verb, *map(str, argv)]


@contextlib.contextmanager
def stopped_before_the_work() -> Iterator[None]:
    """End commands with status 0 at the first update, batch to validate or batch to translate."""

    def stop(*args: Any, **kwargs: Any) -> Any:
        raise SystemExit(0)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fairseq_cli.train, "train", stop)
        patch.setattr(FairseqTask, "inference_step", stop)
        patch.setattr(FairseqTask, "valid_step", stop)
        yield


@contextlib.contextmanager
def restored() -> Iterator[None]:
    """Undo what fairseq's commands change in the process; end them after ``SECONDS``."""

    def end(*args: Any) -> None:
        raise TooLong

    root, environment = logging.getLogger(), dict(os.environ)
    handlers, level = list(root.handlers), root.level
    before = signal.signal(signal.SIGALRM, end)
    signal.alarm(SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()
        os.environ.clear()
        os.environ.update(environment)
        root.handlers[:] = handlers
        root.setLevel(level)


def outcome(argv: Sequence[str]) -> tuple[int, str]:
    """The exit status of a command and what it wrote on stderr, without the log."""
    out, err = io.StringIO(), io.StringIO()
    with (
        restored(),
        stopped_before_the_work(),
        tempfile.TemporaryDirectory() as folder,
        pytest.MonkeyPatch.context() as patch,
    ):
        patch.chdir(folder)
        patch.setattr(tempfile, "tempdir", folder)
        patch.setattr(sys, "stdin", io.StringIO("Hello\n"))
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
            status = main([*argv])
    return status, err.getvalue()


def fault(argv: Sequence[str]) -> str | None:
    """What is wrong with how a command ended; None if nothing is."""
    try:
        status, err = outcome(argv)
    except BaseException as error:
        return f"{type(error).__name__}: {error}"
    lines = [line for line in err.splitlines() if line.startswith("surface-fusion")]
    if "Traceback" in err or status not in (0, 2) or len(lines) != (status == 2):
        return f"status {status}: {err[-500:]}"
    return None


def flags_of(verb: str) -> dict[str, argparse.Action]:
    """The flags of a verb's parser, with those of the default model, task and optimizer, but ``--help``."""
    parsers: list[argparse.ArgumentParser] = []
    with restored(), pytest.MonkeyPatch.context() as patch:
        patch.setattr(argparse.ArgumentParser, "print_help", lambda parser: parsers.append(parser))
        main([verb, *(["embeddings"] if verb == "analyse" else []), "--help"])
    actions = [action for action in parsers[0]._actions if action.option_strings and action.dest != "help"]
    return {max(action.option_strings, key=len): action for action in actions}


def values_of(action: argparse.Action) -> Sequence[str | None]:
    """Wrong values for a flag's kind; None stands for the flag alone."""
    if action.nargs == 0:
        return [None, "word"]
    if action.choices is not None:
        return ["word", ""]
    if action.type in (int, float):
        return NUMBERS
    return TEXTS if action.type in (None, str) else LISTS


def draws(verb: str, seed: int, per_flag: int = 1) -> list[str]:
    """Arguments ``--flag=value`` with wrong values, in random order."""
    rng = random.Random(f"{verb} {seed}")
    drawn = []
    for flag, action in flags_of(verb).items():
        values = values_of(action)
        for value in rng.sample(values, min(per_flag, len(values))):
            drawn.append(flag if value is None else f"{flag}={value}")
    rng.shuffle(drawn)
    return drawn


@pytest.fixture(scope="session")
def place(data: Path, save_dir: Path) -> Place:
    """Also a sentencepiece model, which translate needs."""
    (save_dir / "data-bin").symlink_to(data)  # where translate looks for it
    sentencepiece.SentencePieceTrainer.train(
        input=[str(TEXT / "train.en")],
        model_prefix=str(save_dir / "spm"),
        vocab_size=300,
        hard_vocab_limit=False,
        minloglevel=2,
    )
    return Place(data, save_dir / "checkpoint_last.pt")


@pytest.mark.slow
@pytest.mark.parametrize("verb", SUMMARIES)
def test_wrong_values(place: Place, verb: str) -> None:
    assert outcome(place.argv(verb))[0] == 0
    drawn = draws(verb, SEED)[: DRAWS.get(verb, 30)]
    faults = {flag: fault([*place.argv(verb), flag]) for flag in drawn}
    assert {flag: text for flag, text in faults.items() if text is not None} == {}


def test_every_flag_can_be_drawn(command: Any) -> None:
    for verb, least in (("train", 250), ("preprocess", 50), ("score", 5)):
        drawn = {argument.split("=")[0] for argument in draws(verb, SEED)}
        assert drawn == flags_of(verb).keys() and len(drawn) >= least
