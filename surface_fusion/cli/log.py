"""How our entry point logs: as fairseq does, less one endless line."""

import argparse
import logging
import os
import sys

from omegaconf import DictConfig

LOG_FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"


class ShortConfiguration(logging.Filter):
    """Replaces the configuration that fairseq logs at every start (20,000 characters) by one short line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record, change those whose message is a configuration."""
        if isinstance(record.msg, (DictConfig, argparse.Namespace)):
            record.msg = "configuration not shown; add --show-config to see it"
        return True


def below_error(record: logging.LogRecord) -> bool:
    """Whether *record* is no error."""
    return record.levelno < logging.ERROR


_SHORT_CONFIGURATION = ShortConfiguration()


def set_up_logging(verb: str, stream_name: str, show_config: bool) -> None:
    """Log as fairseq's commands do, on ``stdout`` or ``stderr``.

    Importing fairseq's tasks leaves handlers of its own on the root logger; they are replaced. LOGLEVEL
    (default INFO) decides how much is logged.
    """
    root = logging.getLogger()
    for handler in list(root.handlers):
        if type(handler) is logging.StreamHandler:
            root.removeHandler(handler)
    handler = logging.StreamHandler(getattr(sys, stream_name))
    handler.setFormatter(logging.Formatter(LOG_FORMAT, datefmt="%Y-%m-%d %H:%M:%S"))
    root.addHandler(handler)
    root.setLevel(os.environ.get("LOGLEVEL", "INFO").upper())
    if verb == "interactive":  # which says there how it batches, four lines for every sentence
        logging.getLogger("fairseq.tasks.fairseq_task").setLevel(logging.WARNING)
    # Errors of checkpoints are logged for plain fairseq, which may lose them; here they end the command.
    logging.getLogger("surface_fusion.checkpoints").addFilter(below_error)
    fairseq_logger = logging.getLogger(f"fairseq_cli.{verb}")
    (fairseq_logger.removeFilter if show_config else fairseq_logger.addFilter)(_SHORT_CONFIGURATION)
