"""Run fairseq's commands as verbs, in this process, with this package loaded."""

import argparse
import contextlib
import functools
import importlib
import importlib.util
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from fairseq import options
from fairseq.distributed import utils as distributed_utils
from fairseq.tasks import FairseqTask
from omegaconf import open_dict

from surface_fusion.cli.atomic_outputs import atomic_data_folder, atomic_results
from surface_fusion.cli.checkpoint_flags import add_trust_flag, import_user_dir, trusted_checkpoints
from surface_fusion.cli.log import set_up_logging
from surface_fusion.cli.subwords import subword_hint
from surface_fusion.cli.training_defaults import with_training_defaults
from surface_fusion.cli.user_errors import OneLineParser, refuse, user_line
from surface_fusion.cli.verbs import SUMMARIES
from surface_fusion.cli.yaml_training import train_from_yaml
from surface_fusion.compat.patching import replaced
from surface_fusion.config.ranges import check_config, check_generation, check_model_overrides, check_ranges
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.hooks import trainer_hook
from surface_fusion.models.transformer_surface_fusion import MODEL_NAME
from surface_fusion.training.notices import log_before_first_batch


@dataclass(frozen=True)
class FairseqVerb:
    """One of fairseq's commands."""

    usage: str  # what follows the verb on the command line
    parser: Callable[[], argparse.ArgumentParser]  # makes fairseq's parser
    # The context managers in which the command runs, made from its module and flags.
    replacements: Callable[[Any, Sequence[str]], Iterable[contextlib.AbstractContextManager[None]]]
    log_to: str = "stderr"  # or "stdout", if the log is the result and not translations
    uses_model: bool = True  # takes --trust-checkpoint and the flags of an architecture and a task
    needs_path: bool = True  # cannot run without --path
    defaults: tuple[str, ...] = ()  # flags prepended to the user's, which take precedence
    complete: Callable[[Sequence[str]], list[str]] = list  # adds flags that depend on the others
    # Runs the command with the file of --config, if it takes one.
    from_yaml: Callable[[str, Sequence[str], Callable[[], None]], None] | None = None


@contextlib.contextmanager
def _checked_main(command: Any) -> Iterator[None]:
    """Check the settings in *command*'s ``main``; for commands that do not use ``call_main``."""
    fairseqs_main = command.main

    def main(args: argparse.Namespace) -> Any:
        check_ranges(vars(args))
        check_generation(vars(args))
        check_model_overrides(vars(args))
        return fairseqs_main(args)

    with replaced(command, "main", main):
        yield


VERBS = {
    "preprocess": FairseqVerb(
        "-s SRC -t TGT --trainpref PREFIX --validpref PREFIX --destdir DATA [flags]",
        options.get_preprocessing_parser,
        lambda command, argv: [atomic_data_folder(command), _checked_main(command)],
        uses_model=False,
        needs_path=False,
    ),
    "train": FairseqVerb(
        "DATA --surfacefusion att --sf-gate 0.8 --save-dir DIR [flags]\n"
        "       surface-fusion train --config FILE [KEY=VALUE ...]",
        options.get_training_parser,
        lambda command, argv: [replaced(trainer_hook, "check_settings", False)],
        log_to="stdout",
        needs_path=False,
        defaults=("-a", MODEL_NAME),
        complete=with_training_defaults,
        from_yaml=train_from_yaml,
    ),
    "generate": FairseqVerb(
        "DATA --path CHECKPOINT [flags]",
        options.get_generation_parser,
        lambda command, argv: [
            *(subword_hint("generate", argv), _checked_main(command), atomic_results(command))
        ],
    ),
    "interactive": FairseqVerb(
        "DATA --path CHECKPOINT [flags] < TEXT",
        options.get_interactive_generation_parser,
        lambda command, argv: [subword_hint("interactive", argv)],
    ),
    "validate": FairseqVerb(
        "DATA --path CHECKPOINT --valid-subset valid [flags]",
        options.get_validation_parser,
        lambda command, argv: [
            replaced(FairseqTask, "valid_step", log_before_first_batch(FairseqTask.valid_step))
        ],
        log_to="stdout",
        # The default of fairseq's other commands; without it, fairseq-validate raises KeyError: None.
        defaults=("--task", "translation"),
    ),
}


def run(verb: str, argv: Sequence[str]) -> None:
    """Run one of fairseq's commands.

    Args:
        verb: a key of ``VERBS``.
        argv: the arguments after the verb: flags of fairseq, of the model and of :func:`add_our_flags`.
    """
    spec = VERBS[verb]
    parser = OneLineParser(verb, add_help=False)
    add_our_flags(parser, spec)
    parser.add_argument("--user-dir")
    parser.add_argument("-h", "--help", action="store_true")
    args, others = parser.parse_known_args(argv)
    user_dir = import_user_dir(args.user_dir)
    fairseq_argv = [*spec.defaults, *others]
    config = getattr(args, "config", None)
    with contextlib.ExitStack() as replacements:
        enter = replacements.enter_context
        enter(replaced(argparse.ArgumentParser, "error", refuse))
        if args.help:
            print_help(verb, spec.complete(fairseq_argv))
        if spec.needs_path and not any(argument.split("=")[0] == "--path" for argument in fairseq_argv):
            raise SurfaceFusionError("no checkpoint given; add --path CHECKPOINT")
        if "--use-plasma-view" in fairseq_argv and importlib.util.find_spec("pyarrow") is None:
            raise SurfaceFusionError("--use-plasma-view needs pyarrow; pip install pyarrow or leave it out")
        set_up = functools.partial(set_up_logging, verb, spec.log_to, args.show_config)
        set_up()
        if config is None:
            fairseq_argv = spec.complete(fairseq_argv)
        command = importlib.import_module(f"fairseq_cli.{verb}")
        fairseqs_call_main = distributed_utils.call_main

        def call_main(cfg: Any, main: Callable[..., None], **kwargs: Any) -> None:
            check_config(cfg)
            with open_dict(cfg):
                cfg.pop("job_logging_cfg", None)  # hydra's, which would replace our logging
            fairseqs_call_main(cfg, _SpawnableMain(set_up, main), **kwargs)

        enter(replaced(distributed_utils, "call_main", call_main))
        enter(replaced(sys, "argv", [f"surface-fusion {verb}", "--user-dir", user_dir, *fairseq_argv]))
        enter(trusted_checkpoints(getattr(args, "trust_checkpoint", False)))
        for replacement in spec.replacements(command, fairseq_argv):
            enter(replacement)
        if config is None or spec.from_yaml is None:
            command.cli_main()
        else:
            spec.from_yaml(config, others, set_up)


def add_our_flags(parser: Any, spec: FairseqVerb) -> None:
    """Add the flags that fairseq's command lacks."""
    group = parser.add_argument_group("surface-fusion's own flags")
    group.add_argument(
        "--show-config", action="store_true", help="log fairseq's complete configuration (20,000 characters)"
    )
    if spec.from_yaml is not None:
        group.add_argument(
            "--config",
            metavar="FILE",
            help="train from a YAML file such as configs/demo.yaml; KEY=VALUE arguments override settings",
        )
    if spec.uses_model:
        add_trust_flag(group)


def print_help(verb: str, argv: Sequence[str]) -> NoReturn:
    """Print fairseq's help, with the flags of the chosen architecture and task, and ours; then exit."""
    spec = VERBS[verb]
    parser = spec.parser()
    parser.usage = f"surface-fusion {verb} {spec.usage}"
    parser.description = f"{SUMMARIES[verb]}: fairseq-{verb} with surface-fusion loaded"

    def print_and_exit(*_: Any) -> NoReturn:
        add_our_flags(parser, spec)
        parser.print_help()
        parser.exit()

    if spec.uses_model:
        # fairseq calls modify_parser twice: before and after adding the flags of architecture and task.
        steps = iter((lambda _: None, print_and_exit))
        options.parse_args_and_arch(parser, argv, modify_parser=lambda parser: next(steps)(parser))
    print_and_exit()


@dataclass
class _SpawnableMain:
    """A command's ``main`` that also sets up logging and reports errors in the processes spawned for it."""

    set_up: Callable[[], None]
    main: Callable[..., None]
    spawned: bool = False

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Set up a spawned process, before fairseq's code runs there."""
        vars(self).update(state, spawned=True)
        self.set_up()

    def __call__(self, *args: Any, **kwargs: Any) -> None:
        """Run the command; the parent of a spawned process reads the traceback (user_errors.CHILD_ERROR)."""
        try:
            self.main(*args, **kwargs)
        except Exception as exception:
            line = user_line(exception) if self.spawned else None
            if line is None:
                raise
            raise SurfaceFusionError(line) from None
