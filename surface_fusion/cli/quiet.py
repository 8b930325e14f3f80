"""What our entry point leaves unsaid: one endless log line, and warnings that no user can act on."""

import argparse
import logging
import os
import sys
import warnings

from omegaconf import DictConfig

LOG_FORMAT = "%(asctime)s | %(levelname)s | %(name)s | %(message)s"

# (start of the message, module that warns, category), each with what would have to change.
HARMLESS_WARNINGS: tuple[tuple[str, str, type[Warning]], ...] = (
    # fairseq calls hydra by the names of hydra 1.0.
    (r"hydra\.experimental\.", r"hydra\.", UserWarning),
    (r"\s*The version_base parameter is not specified", r"hydra\.", UserWarning),
    (r"\s*The strict flag in the compose API is deprecated", r"hydra\.", UserWarning),
    (r"In 'config': Usage of deprecated keyword in package header", r"hydra\.", UserWarning),
    (r"\s*'config' is validated against ConfigStore schema", "", UserWarning),
    # fairseq calls torch by the names of torch 1.
    (r"`torch\.cuda\.amp\.", r"fairseq\.", FutureWarning),
    # fairseq's self-attention in the decoder: a float causal mask with a bool padding mask.
    (r"Support for mismatched key_padding_mask and attn_mask is deprecated", r"torch\.nn\.", UserWarning),
    # fairseq pins memory whether or not there is a GPU.
    (r"'pin_memory' argument is set as true but no accelerator is found", r"torch\.utils\.data", UserWarning),
    # --trust-checkpoint asked for it.
    (r"Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected", r"fairseq\.", UserWarning),
)


def silence_harmless_warnings() -> None:
    """Ignore the warnings above, each by its text; ``-W`` and PYTHONWARNINGS show them again."""
    if sys.warnoptions:
        return
    for message, module, category in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)


class ShortConfiguration(logging.Filter):
    """Replaces the configuration that fairseq logs at every start (20,000 characters) by one short line."""

    def filter(self, record: logging.LogRecord) -> bool:
        """Keep every record, change those whose message is a configuration."""
        if isinstance(record.msg, (DictConfig, argparse.Namespace)):
            record.msg = "configuration not shown; add --show-config to see it"
        return True


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
    fairseq_logger = logging.getLogger(f"fairseq_cli.{verb}")
    (fairseq_logger.removeFilter if show_config else fairseq_logger.addFilter)(_SHORT_CONFIGURATION)
