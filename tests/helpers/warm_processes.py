"""Run commands in new processes that need not import torch and fairseq, which takes 5 seconds each time.

They are forked from one process that has imported these, but not the plugin. Each has its own streams,
environment and exit status. Where a test is about how an interpreter starts or ends, use ``subprocess``.
"""

import contextlib
import functools
import importlib
import io
import logging
import multiprocessing
import os
import runpy
import signal
import sys
import tempfile
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch.multiprocessing

SURFACE_FUSION = "surface_fusion.cli.main:main"
"""The entry point of the command ``surface-fusion``."""

PRELOADED = (
    *("fairseq.options", "fairseq.trainer", "fairseq.scoring", "fairseq.sequence_generator"),
    *("torch._dynamo", "torch.distributed", "sacrebleu"),
    "pytest",  # the module __main__ of the process that asks for a fork, which multiprocessing imports
)

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload([*PRELOADED])


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit status (``-N`` after signal ``N``) and what it printed."""

    returncode: int
    stdout: str
    stderr: str


def start(
    entry_point: str,
    *argv: object,
    stdin: int | None = None,
    stdout: int | None = None,
    stderr: int | None = None,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
) -> BaseProcess:
    """Start a process that calls *entry_point* with *argv* in ``sys.argv``.

    Args:
        entry_point: ``MODULE:FUNCTION``, as of a console command: what it returns is the exit status.
        stdin: a file descriptor; by default the null device, as *stdout* and *stderr*.
        env: the environment; by default this process's.
        cwd: the current folder; by default this process's.
    """
    with open(os.devnull, "r+b") as null:
        files = [null.fileno() if file is None else file for file in (stdin, stdout, stderr)]
        streams = [Connection(os.dup(file)) for file in files]  # which can be sent to another process
    command = (entry_point, [*map(str, argv)], dict(os.environ if env is None else env), cwd or Path.cwd())
    process = _server.Process(target=_call, args=(streams, *command))
    process.start()
    for stream in streams:
        stream.close()
    return process


def run(
    entry_point: str,
    *argv: object,
    text: str | bytes = "",
    stdout: int | None = None,
    merge: bool = False,
    env: Mapping[str, str] | None = None,
    cwd: Path | None = None,
    timeout: float = 300,
) -> Ended:
    """Run a process to its end; see :func:`start`.

    Args:
        text: its standard input.
        stdout: a file descriptor to write to, instead of to the result.
        merge: whether its standard error is part of its standard output.
        timeout: in seconds; a process that runs longer is killed.
    """
    with contextlib.ExitStack() as stack:
        given, out, err = (stack.enter_context(tempfile.TemporaryFile()) for _ in range(3))
        given.write(text.encode() if isinstance(text, str) else text)
        given.seek(0)
        output = out.fileno() if stdout is None else stdout
        error = output if merge else err.fileno()
        streams = {"stdin": given.fileno(), "stdout": output, "stderr": error}
        status = wait(start(entry_point, *argv, **streams, env=env, cwd=cwd), timeout)
        printed = []
        for file in (out, err):
            file.seek(0)
            printed.append(file.read().decode())
    return Ended(status, *printed)


def wait(process: BaseProcess, timeout: float) -> int:
    """The exit status of *process*, which is killed after *timeout* seconds."""
    process.join(timeout)
    if process.exitcode is None:
        process.kill()
        process.join()
    assert process.exitcode is not None
    return process.exitcode


spawn = functools.partial(torch.multiprocessing.start_processes, start_method="forkserver")
"""``torch.multiprocessing.spawn``."""


def in_two(function: Callable[..., Any], *args: Any) -> None:
    """Call ``function(rank, *args)`` in two processes."""
    spawn(function, args, nprocs=2)


def run_python() -> None:
    """Entry point for ``python -m MODULE ARGUMENT...`` and ``python FILE ARGUMENT...``."""
    flag, *argv = sys.argv[1:]
    if flag == "-m":
        sys.argv[:] = argv
        runpy.run_module(argv[0], run_name="__main__", alter_sys=True)
    else:
        sys.argv[:] = [flag, *argv]
        sys.path.insert(0, os.path.dirname(flag))
        runpy.run_path(flag, run_name="__main__")


def _call(
    streams: list[Connection], entry_point: str, argv: list[str], env: dict[str, str], cwd: Path
) -> None:
    """What a process does: become like a new interpreter, then call *entry_point*."""
    for target, stream in enumerate(streams):
        os.dup2(stream.fileno(), target)
        stream.close()
    encoding, buffering = env.get("PYTHONIOENCODING", "utf-8"), 0 if env.get("PYTHONUNBUFFERED") else -1
    sys.stdin = os.fdopen(0, encoding=encoding, closefd=False)
    out, err = (os.fdopen(file, "wb", buffering, closefd=False) for file in (1, 2))
    sys.stdout = io.TextIOWrapper(out, encoding, write_through=not buffering)
    sys.stderr = io.TextIOWrapper(err, encoding, write_through=not buffering, line_buffering=True)
    logging.root.handlers.clear()  # the import of fairseq sets up logging
    logging.root.setLevel(logging.WARNING)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # ignored where a shell started pytest with "&"
    os.environ.clear()
    os.environ.update(env)
    os.chdir(cwd)
    # As many processes as a command spawns: each would import everything again.
    torch.multiprocessing.spawn = functools.partial(
        torch.multiprocessing.start_processes, start_method="fork"
    )
    module, _, function = entry_point.partition(":")
    sys.argv[:] = [module.partition(".")[0], *argv]
    try:
        sys.exit(getattr(importlib.import_module(module), function)())
    except Exception:
        traceback.print_exc()
        sys.exit(1)
