"""Recognise the exceptions that a user's mistake causes, and report them in one line."""

import argparse
import difflib
import re
import sys
import tempfile
import traceback
from typing import Any, NoReturn

from surface_fusion.errors import SurfaceFusionError, shorten
from surface_fusion.io.atomic_write import NO_SPACE

# torch.multiprocessing.spawn passes on an exception of a child process as the text of its traceback.
CHILD_ERROR = re.compile(
    rf"^{SurfaceFusionError.__module__}\.{SurfaceFusionError.__name__}: (.*)$", re.MULTILINE
)


NO_GPU = ("Torch not compiled with CUDA enabled", "Found no NVIDIA driver", "No CUDA GPUs are available")
"""Beginnings of torch's errors where there is no GPU."""


def refuse(parser: argparse.ArgumentParser, message: str) -> NoReturn:
    """Raise *message* as one line; a list of choices above 300 characters is replaced by the closest ones.

    Raises:
        SurfaceFusionError: always.
    """
    if long_choice := re.search(r"invalid choice: '(.*?)'( \(choose from (.{300,})\))$", message):
        chosen, listed, choices = long_choice.groups()
        close = difflib.get_close_matches(chosen, re.findall(r"[^\s,']+", choices), n=3)
        message = message.replace(listed, f", did you mean {' or '.join(close)}?" if close else "")
    raise SurfaceFusionError(f"{message} (see {parser.prog} --help)")


class OneLineParser(argparse.ArgumentParser):
    """The parser of *verb*, which any of *usages* follows; raises :class:`SurfaceFusionError`.

    An option may have one value only.
    """

    def __init__(self, verb: str, *usages: str, **kwargs: Any) -> None:
        prog = f"surface-fusion {verb}"
        usage = "\n       ".join(f"{prog} {usage}" for usage in usages)
        super().__init__(prog=prog, usage=usage, allow_abbrev=False, **kwargs)
        for name in (None, "store"):
            self.register("action", name, _StoreOnce)

    error = refuse


class _StoreOnce(argparse._StoreAction):
    """argparse's default action, but a second, different value is an error."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        super().__call__(parser, namespace, values, option_string)
        first = vars(namespace).setdefault("_first_values", {}).setdefault(self.dest, values)
        if option_string is not None and repr(first) != repr(values):  # nan differs from itself
            refuse(parser, f"{option_string} is given twice, {first} and {values}; give it once")


def user_line(exception: BaseException) -> str | None:
    """Return the error line if *exception*, or one in its chain, is a user's mistake; else None."""
    chain = [exception]
    while (cause := chain[-1].__cause__ or chain[-1].__context__) is not None:
        chain.append(cause)
    lines = [str(error) for error in chain if isinstance(error, SurfaceFusionError)]
    if not lines:  # the first one raised is the most specific
        lines = [line for error in reversed(chain) if (line := _known_line(error)) is not None]
    return " ".join(lines[0].split()) if lines else None


def bug_line(exception: BaseException) -> str:
    """Return the error line of an exception that is no user's mistake; write its traceback to a file.

    The file is a new one in the folder of temporary files (``TMPDIR``). If it cannot be written, the
    traceback is printed on stderr.
    """
    name, text = type(exception).__name__, str(exception).strip()
    if name == "ProcessRaisedException":  # torch's; its text ends with the traceback of a child process
        name, _, text = text.splitlines()[-1].partition(": ")
    line = f"unexpected error: {name}: {shorten(' '.join(text.split()), 300)}"
    trace = "".join(traceback.format_exception(exception))
    try:
        descriptor, path = tempfile.mkstemp(prefix="surface-fusion-", suffix=".traceback", text=True)
        with open(descriptor, "w", encoding="utf-8", errors="backslashreplace") as file:
            file.write(trace)
    except OSError as error:
        print(trace, file=sys.stderr)
        return f"{line}; its traceback is above and could not be written to a file: {error.strerror}"
    return f"{line}; the traceback is in {path}"


def _known_line(exception: BaseException) -> str | None:
    from hydra.errors import HydraException  # these are slow to import
    from omegaconf.errors import MissingMandatoryValue, OmegaConfBaseException

    text = str(exception)
    if child := CHILD_ERROR.findall(text):
        return str(child[-1])
    if isinstance(exception, FileExistsError):
        return f"{exception.filename or text} already exists; remove it or write to another path"
    if isinstance(exception, FloatingPointError):  # an error of fairseq's NaN detector may follow it
        if text == "gradients are Nan/Inf":
            return f"the training diverged, {text}; lower --lr or warm up longer"
        return text
    if isinstance(exception, OSError) and exception.filename is not None:
        return f"{exception.filename}: {exception.strerror}"
    if isinstance(exception, FileNotFoundError):
        return text
    if isinstance(exception, OSError) and exception.errno in NO_SPACE:
        return f"the output cannot be written: {exception.strerror}"
    if isinstance(exception, OmegaConfBaseException) and exception.full_key is not None:
        setting, fault = exception.full_key, text.splitlines()[0].rstrip(".")
        if isinstance(exception, MissingMandatoryValue) or re.search("None|not Optional", fault):
            return f"--{setting.split('.')[-1].replace('_', '-')} is missing; add it"
        return f"{setting}: {fault}"
    if isinstance(exception, HydraException):
        return text.splitlines()[0]
    if isinstance(exception, RuntimeError) and text.startswith("Error(s) in loading state_dict"):
        return shorten(text, 300) + "; was the checkpoint trained with other flags?"
    if text.startswith(NO_GPU):
        return f"{text.splitlines()[0].rstrip('.')}; leave out flags that need a GPU, such as --profile"
    module = _raising_module(exception)
    if module == "ast":  # fairseq reads the values of some flags by literal_eval
        source = exception.text if isinstance(exception, SyntaxError) else None
        value = f" {source.strip()!r}" if source else ""
        fault = re.sub(r"( \(<| on line |: <).*", "", text, flags=re.DOTALL)  # without the place in the text
        return f"the value{value} of a flag is not a number or list: {fault}"
    if module == "fairseq_cli.train" and isinstance(exception, KeyError):
        return f"validation does not log {text}, which --best-checkpoint-metric names; give another metric"
    if module.split(".")[0] in ("fairseq", "fairseq_cli") and text:
        # fairseq reports users' mistakes by Exception, OSError, ImportError for an optional package,
        # assertions with a text, and ValueErrors that name a flag or come from its distributed module
        # ("world size is 2 but have 0 available devices").
        if type(exception) in (Exception, OSError, ImportError, AssertionError):
            return text
        names_a_flag = re.search(r"(^|\W)--[a-z]", text) or module == "fairseq.distributed.utils"
        if isinstance(exception, ValueError) and names_a_flag:
            return text
    return None


def _raising_module(exception: BaseException) -> str:
    """Return the name of the module that raised *exception*."""
    frames = [frame for frame, _ in traceback.walk_tb(exception.__traceback__)]
    return str(frames[-1].f_globals.get("__name__")) if frames else ""
