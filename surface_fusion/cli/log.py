"""Set up logging as fairseq does, without the line that contains the whole configuration."""

import argparse
import logging
import os
import sys
from typing import TextIO

from omegaconf import DictConfig

from surface_fusion.cli.streams import discard_output


def shorten_configuration(record: logging.LogRecord) -> bool:
    """Replace the configuration that fairseq logs at each start (20,000 characters) by one short line."""
    if isinstance(record.msg, (DictConfig, argparse.Namespace)):
        record.msg = "configuration not shown; add --show-config to see it"
    return True


def below_error(record: logging.LogRecord) -> bool:
    """Whether *record* is below the level ERROR."""
    return record.levelno < logging.ERROR


class LogHandler(logging.StreamHandler[TextIO]):
    """Ends the command if the reader of the log has closed it; reports a full disk once and goes on."""

    failed = False

    def handleError(self, record: logging.LogRecord) -> None:
        """Handle the error of writing *record*."""
        error = sys.exc_info()[1]
        if isinstance(error, BrokenPipeError):
            raise error
        if not isinstance(error, OSError):
            super().handleError(record)
        elif not self.failed:
            self.failed = True
            print(f"surface-fusion: the log cannot be written: {error.strerror}", file=sys.stderr)
            discard_output(self.stream)


def set_up_logging(verb: str, stream_name: str, show_config: bool) -> None:
    """Log as fairseq's commands do, on ``stdout`` or ``stderr``.

    Handlers that fairseq's tasks added to the root logger on import are replaced. The environment variable
    LOGLEVEL (default INFO) sets the level.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) in (logging.StreamHandler, LogHandler):
            root.removeHandler(handler)
    handler = LogHandler(getattr(sys, stream_name))
    line = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"
    handler.setFormatter(logging.Formatter(line, datefmt="%Y-%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    if verb == "interactive":  # logs four lines about batching per sentence
        logging.getLogger("fairseq.tasks.fairseq_task").setLevel(logging.WARNING)
    # These errors are logged because fairseq's trainer hides them; the verbs print them as the last line.
    # fairseq.dataclass.utils lists all settings in its error.
    for name in ("surface_fusion.models.upgrade_state_dict", "fairseq.dataclass.utils"):
        logging.getLogger(name).addFilter(below_error)
    command = logging.getLogger(f"fairseq_cli.{verb}")
    (command.removeFilter if show_config else command.addFilter)(shorten_configuration)
