"""Make the outputs of preprocess and generate atomic: complete files or none."""

import contextlib
import functools
import io
import logging
import os
import shutil
from argparse import Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from surface_fusion.compat.patching import replaced
from surface_fusion.io.atomic_write import NO_SPACE, WriteError, atomic_write, create_folder, remove_abandoned


@contextlib.contextmanager
def atomic_results(command: Any) -> Iterator[None]:
    """Inside the block, *command* (``fairseq_cli.generate``) writes its ``--results-path`` atomically.

    Raises:
        SurfaceFusionError: it cannot be written; an earlier file is unchanged.
    """
    command.open = _open  # hides Python's open from fairseq's main
    try:
        yield
    finally:
        del command.open


@contextlib.contextmanager
def _open(path: str, mode: str, buffering: int, encoding: str) -> Iterator[io.TextIOWrapper]:
    with atomic_write(path) as file:
        text = io.TextIOWrapper(file, encoding=encoding)
        yield text
        text.detach()  # flushes; atomic_write closes


@contextlib.contextmanager
def atomic_data_folder(command: Any) -> Iterator[None]:
    """Inside the block, *command* (``fairseq_cli.preprocess``) writes its files atomically.

    Raises:
        SurfaceFusionError: a file cannot be written; earlier files are unchanged.
    """
    main = functools.partial(_preprocess, command.main, command.logger)
    with replaced(command, "main", main), replaced(logging, "raiseExceptions", False):
        yield


def _preprocess(main: Callable[[Namespace], None], logger: logging.Logger, args: Namespace) -> None:
    """Run ``fairseq_cli.preprocess.main`` in a new folder in *args.destdir*, then move the files there."""
    destdir = args.destdir
    _refuse_other_dictionaries(args)
    created = not os.path.exists(destdir)
    os.makedirs(destdir, exist_ok=True)
    try:
        remove_abandoned(destdir)
        folder, lock = create_folder(destdir, "preprocess")
    except OSError as error:
        raise WriteError(destdir, error) from error
    args.destdir, handlers = folder, list(logger.handlers)

    def name_destdir(record: logging.LogRecord) -> bool:
        record.msg = str(record.msg).replace(folder, destdir)
        return True

    logger.addFilter(name_destdir)
    try:
        try:
            main(args)
        finally:
            close_logs(logger, handlers)
        _move(folder, destdir)
    except OSError as error:
        if error.errno not in NO_SPACE:
            raise
        raise WriteError(destdir, error) from error
    finally:
        logger.removeFilter(name_destdir)
        shutil.rmtree(folder, ignore_errors=True)
        os.close(lock)
        if created:
            with contextlib.suppress(OSError):  # it is not empty after a success
                os.rmdir(destdir)


def _refuse_other_dictionaries(args: Namespace) -> None:
    """Raise FileExistsError if a dictionary exists; fairseq checks only the new, empty folder."""
    languages = [] if args.srcdict else [args.source_lang]
    languages += [] if args.only_source or args.tgtdict else [args.target_lang]
    for language in languages:
        path = os.path.join(args.destdir, f"dict{'' if language is None else f'.{language}'}.txt")
        if os.path.exists(path):
            raise FileExistsError(path)


def _move(source: str, target: str) -> None:
    for path in sorted(Path(source).iterdir()):
        earlier = Path(target, path.name)
        if path.name == "preprocess.log" and earlier.exists():
            with earlier.open("ab") as log:
                log.write(path.read_bytes())
        else:
            path.replace(earlier)


def close_logs(logger: logging.Logger, kept: list[logging.Handler]) -> None:
    """Close the log file that fairseq leaves open: all handlers of *logger* but those *kept*."""
    for handler in set(logger.handlers) - set(kept):
        logger.removeHandler(handler)
        with contextlib.suppress(OSError):
            handler.close()
