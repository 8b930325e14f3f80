"""Run fairseq's commands as verbs, with this package loaded, and the flags that all verbs share.

The commands run in this process.
"""

import argparse
import contextlib
import functools
import importlib
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from fairseq import options, tasks, utils
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import FairseqTask

import surface_fusion
from surface_fusion.cli import user_errors
from surface_fusion.cli.atomic_outputs import atomic_outputs
from surface_fusion.cli.log import set_up_logging
from surface_fusion.cli.subwords import with_hint
from surface_fusion.compat.checkpoint_loading import TRUST_VARIABLE
from surface_fusion.compat.patching import replaced
from surface_fusion.config.ranges import check_config, check_generation, check_ranges
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.transformer_surface_fusion import MODEL_NAME
from surface_fusion.training.notices import log_before_first_batch


@dataclass(frozen=True)
class FairseqVerb:
    """One of fairseq's commands.

    Attributes:
        summary: one line for ``--help``.
        usage: what follows the verb on the command line.
        parser: the function in ``fairseq.options`` that builds its parser.
        log_to: ``stdout`` if the log is the result, ``stderr`` if translations are written to stdout.
        loads_checkpoint: whether the command loads a checkpoint and takes ``--trust-checkpoint``.
        defaults: flags prepended to the user's, which take precedence.
    """

    summary: str
    usage: str
    parser: str
    log_to: str = "stderr"
    loads_checkpoint: bool = True
    defaults: tuple[str, ...] = ()


FAIRSEQ_VERBS = {
    "preprocess": FairseqVerb(
        "build dictionaries and binarise parallel text",
        "-s SRC -t TGT --trainpref PREFIX --validpref PREFIX --destdir DATA [flags]",
        "get_preprocessing_parser",
        loads_checkpoint=False,
    ),
    "train": FairseqVerb(
        "train a model or resume training",
        "DATA [-a ARCH] --surfacefusion att --sf-gate 0.8 --save-dir DIR [flags]",
        "get_training_parser",
        log_to="stdout",
        defaults=("-a", MODEL_NAME),
    ),
    "generate": FairseqVerb(
        "translate a binarised test set", "DATA --path CHECKPOINT [flags]", "get_generation_parser"
    ),
    "interactive": FairseqVerb(
        "translate plain text, line by line",
        "DATA --path CHECKPOINT [flags] < TEXT",
        "get_interactive_generation_parser",
    ),
    "validate": FairseqVerb(
        "loss and perplexity of a checkpoint on a data set",
        "DATA --path CHECKPOINT --valid-subset valid [flags]",
        "get_validation_parser",
        log_to="stdout",
        # The default of fairseq's other commands; without it, fairseq-validate raises KeyError: None.
        defaults=("--task", "translation"),
    ),
}


def run(verb: str, argv: Sequence[str]) -> None:
    """Run one of fairseq's commands.

    Args:
        verb: a key of ``FAIRSEQ_VERBS``.
        argv: the arguments after the verb: flags of fairseq, of the model and of :func:`add_our_flags`.
    """
    spec = FAIRSEQ_VERBS[verb]
    parser = user_errors.OneLineParser(prog=f"surface-fusion {verb}", add_help=False, allow_abbrev=False)
    add_our_flags(parser, spec)
    parser.add_argument("--user-dir")
    parser.add_argument("-h", "--help", action="store_true")
    args, fairseq_argv = parser.parse_known_args(argv)
    user_dir = _user_dir(args.user_dir)
    fairseq_argv = [*spec.defaults, *fairseq_argv]
    set_up = functools.partial(set_up_logging, verb, spec.log_to, args.show_config)
    with contextlib.ExitStack() as replacements:
        enter = replacements.enter_context
        enter(replaced(argparse.ArgumentParser, "error", user_errors.refuse))
        if args.help:
            print_help(verb, fairseq_argv)
            return
        has_path = any(argument.split("=")[0] == "--path" for argument in fairseq_argv)
        if spec.loads_checkpoint and verb != "train" and not has_path:
            raise SurfaceFusionError("no checkpoint given; add --path CHECKPOINT")
        set_up()
        enter(replaced(sys, "argv", [f"surface-fusion {verb}", "--user-dir", user_dir, *fairseq_argv]))
        enter(trusted_checkpoints(getattr(args, "trust_checkpoint", False)))
        if verb in ("generate", "interactive"):
            enter(replaced(tasks, "setup_task", with_hint(tasks.setup_task, verb, fairseq_argv)))
        if verb == "validate":
            enter(replaced(FairseqTask, "valid_step", log_before_first_batch(FairseqTask.valid_step)))
        fairseqs_call_main = distributed_utils.call_main

        def call_main(cfg: Any, main: Callable[..., None], **kwargs: Any) -> None:
            check_config(cfg)
            fairseqs_call_main(cfg, _SpawnableMain(set_up, main), **kwargs)

        enter(replaced(distributed_utils, "call_main", call_main))
        if verb == "preprocess":
            check_ranges(vars(options.get_preprocessing_parser().parse_known_args(fairseq_argv)[0]))
        command = importlib.import_module(f"fairseq_cli.{verb}")
        if verb == "generate":  # its cli_main does not use call_main
            enter(replaced(command, "main", functools.partial(_checked_main, command.main)))
        enter(atomic_outputs(verb, command))
        command.cli_main()


def _checked_main(main: Callable[..., Any], args: argparse.Namespace) -> Any:
    """Check the settings, then call fairseq's ``generate.main``."""
    check_ranges(vars(args))
    check_generation(vars(args))
    return main(args)


def add_our_flags(parser: Any, spec: FairseqVerb) -> None:
    """Add the flags that fairseq's command lacks."""
    group = parser.add_argument_group("surface-fusion's own flags")
    group.add_argument(
        "--show-config", action="store_true", help="log fairseq's complete configuration (20,000 characters)"
    )
    if spec.loads_checkpoint:
        add_trust_flag(group)


def add_trust_flag(parser: Any) -> None:
    """Add ``--trust-checkpoint``, a flag of every verb that loads a checkpoint."""
    parser.add_argument(
        "--trust-checkpoint",
        action="store_true",
        help="load checkpoints that contain arbitrary pickled objects or name other models and tasks than "
        "SurfaceFusion models and plain Transformers; such a file can run any code, so use this only for "
        "files from people you trust",
    )


def add_user_dir_flag(parser: Any) -> None:
    """Add ``--user-dir`` to a verb that is not fairseq's; the folder is imported when the flag is parsed."""
    parser.add_argument(
        "--user-dir",
        action=_ImportUserDir,
        metavar="DIR",
        help="folder of Python code to import first, for example to register the checkpoint's method",
    )


class _ImportUserDir(argparse.Action):
    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        setattr(namespace, self.dest, _user_dir(values))


def _user_dir(folder: str | None) -> str:
    """Import *folder*, the value of ``--user-dir``, and return it; without one, return this package's."""
    if folder is None:
        return str(Path(surface_fusion.__file__).parent)
    try:
        utils.import_user_module(argparse.Namespace(user_dir=folder))
    except FileNotFoundError as error:
        raise SurfaceFusionError(
            f"--user-dir {error} does not exist; leave it out to use surface-fusion's own"
        ) from error
    return folder


def print_help(verb: str, argv: Sequence[str]) -> None:
    """Print fairseq's help, including the flags of the chosen architecture and task, and ours."""
    spec = FAIRSEQ_VERBS[verb]
    parser = getattr(options, spec.parser)()
    parser.usage = f"surface-fusion {verb} {spec.usage}"
    parser.description = f"{spec.summary}: fairseq-{verb} with surface-fusion loaded"
    if verb == "preprocess":
        add_our_flags(parser, spec)
        parser.print_help()
        return
    calls = 0

    def stop_when_complete(parser: argparse.ArgumentParser) -> None:
        # fairseq calls this twice: before and after adding the flags of the architecture and the task.
        nonlocal calls
        calls += 1
        if calls == 2:
            add_our_flags(parser, spec)
            parser.print_help()
            raise _HelpPrinted

    with contextlib.suppress(_HelpPrinted):
        options.parse_args_and_arch(parser, argv, modify_parser=stop_when_complete)


class _HelpPrinted(Exception):
    """Ends fairseq's parsing once the help is printed."""


@dataclass(frozen=True)
class _SpawnableMain:
    """A command's ``main`` that also sets up logging and reports errors in the processes spawned for it."""

    set_up: Callable[[], None]
    main: Callable[..., None]

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        self.main(*args, **kwargs)

    def __reduce__(self) -> tuple[Any, ...]:
        return _unpickled_main, (self.set_up, self.main)


def _unpickled_main(set_up: Callable[[], None], main: Callable[..., None]) -> Callable[..., None]:
    """Set up a spawned process; called before fairseq's code runs there."""
    set_up()
    return functools.partial(_main_of_child, main)


def _main_of_child(main: Callable[..., None], *args: Any, **kwargs: Any) -> None:
    try:
        main(*args, **kwargs)
    except Exception as exception:
        line = user_errors.user_line(exception)
        if line is None:
            raise
        # The parent receives the text of the traceback, see user_errors.CHILD_ERROR.
        raise SurfaceFusionError(line) from None


@contextlib.contextmanager
def trusted_checkpoints(trust: bool = True) -> Iterator[None]:
    """If *trust*, set torch's variable that allows full unpickling, in the block and its child processes."""
    if not trust:
        yield
        return
    before = os.environ.get(TRUST_VARIABLE)
    os.environ[TRUST_VARIABLE] = "1"
    try:
        yield
    finally:
        if before is None:
            del os.environ[TRUST_VARIABLE]
        else:
            os.environ[TRUST_VARIABLE] = before
