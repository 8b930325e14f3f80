"""``surface-fusion VERB ...``: dispatch to a verb and set the exit status.

The module of a verb, and with it torch and fairseq, is imported when the verb runs.
"""

import difflib
import importlib
import sys

from surface_fusion.cli.streams import discard_output
from surface_fusion.cli.user_errors import bug_line, user_line
from surface_fusion.cli.verbs import FAIRSEQ_VERBS, OWN_VERBS, SUMMARIES
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.io.atomic_write import NO_SPACE
from surface_fusion.version import __version__

_LIST = "\n".join(f"  {verb:<12} {summary}" for verb, summary in SUMMARIES.items())
HELP = f"""\
usage: surface-fusion VERB ...

Encoder layer fusion for fairseq. The first five verbs are fairseq's commands with this package
loaded and accept all of fairseq's flags.

{_LIST}

surface-fusion VERB --help shows the flags of a verb, surface-fusion --version the version."""


def main(argv: list[str] | None = None) -> int:
    """Run the command line *argv* (default: ``sys.argv``).

    Returns:
        The exit status: 0; 2 after a user error, printed as one line on stderr; 130 if interrupted; 141 if
        standard output was closed; 1 after any other exception, which is a bug: one line on stderr names the
        file of its traceback.
    """
    argv = sys.argv[1:] if argv is None else argv
    name = "surface-fusion" + (f" {argv[0]}" if argv and argv[0] in SUMMARIES else "")
    status = 0
    try:
        try:
            _run(argv)
        except SystemExit as stop:  # argparse after --help
            if isinstance(stop.code, str):
                raise SurfaceFusionError(stop.code) from None
            status = stop.code or 0
        if sys.stdout is not None:
            sys.stdout.flush()
        return status
    except KeyboardInterrupt:
        print(f"{name}: interrupted", file=sys.stderr)
        return 130
    except BrokenPipeError:  # as in "surface-fusion info | head -1"
        discard_output(sys.stdout)
        return 141
    except Exception as exception:
        line = user_line(exception)
        if isinstance(exception, OSError) and exception.errno in NO_SPACE:
            discard_output(sys.stdout)
        print(f"{name}: error: {line or bug_line(exception)}", file=sys.stderr)
        return 1 if line is None else 2


def _run(argv: list[str]) -> None:
    if not argv:
        raise SurfaceFusionError(f"no verb given; choose one of {', '.join(SUMMARIES)}")
    verb, *rest = argv
    if verb in ("-h", "--help"):
        print(HELP)
    elif verb in ("-V", "--version"):
        print(f"surface-fusion {__version__}")
    elif verb in OWN_VERBS:
        importlib.import_module(f"surface_fusion.cli.{verb}").run(rest)
    elif verb in FAIRSEQ_VERBS:
        from surface_fusion.cli import fairseq_verbs

        fairseq_verbs.run(verb, rest)
    else:
        close = difflib.get_close_matches(verb, SUMMARIES, n=1)
        hint = f"did you mean {close[0]}?" if close else f"choose one of {', '.join(SUMMARIES)}"
        raise SurfaceFusionError(f"unknown verb {verb}; {hint}")
