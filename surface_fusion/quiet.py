"""Noise that fairseq makes at every start and that no user can act on."""

import contextlib
import logging
import sys
import warnings
from collections.abc import Iterator

# (start of the message, module that warns, category), each with what would have to change.
HARMLESS_WARNINGS: tuple[tuple[str, str, type[Warning]], ...] = (
    # fairseq calls hydra by the names of hydra 1.0.
    (r"hydra\.experimental\.", r"hydra\.", UserWarning),
    (r"\s*The version_base parameter is not specified", r"hydra\.", UserWarning),
    (r"\s*The strict flag in the compose API is deprecated", r"hydra\.", UserWarning),
    (r"In 'config': Usage of deprecated keyword in package header", r"hydra\.", UserWarning),
    (r"\s*'.*' is validated against ConfigStore schema", "", UserWarning),
    # fairseq calls torch by the names of torch 1.
    (r"`torch\.cuda\.amp\.", r"fairseq\.", FutureWarning),
    # fairseq's self-attention in the decoder: a float causal mask with a bool padding mask.
    (r"Support for mismatched key_padding_mask and attn_mask is deprecated", r"torch\.nn\.", UserWarning),
    # fairseq pins memory whether or not there is a GPU.
    (r"'pin_memory' argument is set as true but no accelerator is found", r"torch\.utils\.data", UserWarning),
    # --trust-checkpoint asked for it.
    (r"Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected", r"fairseq\.", UserWarning),
)


@contextlib.contextmanager
def root_logger_left_alone() -> Iterator[None]:
    """Import fairseq without its configuring the root logger, as two of its tasks do, to log everything."""
    # logging.basicConfig does nothing where there is a handler.
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


def silence_harmless_warnings() -> None:
    """Ignore the warnings above, each by its text; ``-W`` and PYTHONWARNINGS show them again."""
    if sys.warnoptions:
        return
    for message, module, category in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
