"""Silence warnings of fairseq that users cannot act on."""

import sys
import warnings

# (start of the message, module that warns, category), each with its cause.
HARMLESS_WARNINGS: tuple[tuple[str, str, type[Warning]], ...] = (
    # fairseq uses hydra 1.0's API.
    (r"hydra\.experimental\.", r"hydra\.", UserWarning),
    # fairseq passes an argument of DistributedDataParallel that newer torch renames.
    (r"broadcast_buffers is deprecated", r"(surface_fusion\.compat|fairseq)\.", FutureWarning),
    (r"\s*The version_base parameter is not specified", r"hydra\.", UserWarning),
    (r"\s*The strict flag in the compose API is deprecated", r"hydra\.", UserWarning),
    (r"In 'config': Usage of deprecated keyword in package header", r"hydra\.", UserWarning),
    (r"\s*'.*' is validated against ConfigStore schema", "", UserWarning),
    # fairseq uses torch 1's API.
    (r"`torch\.cuda\.amp\.", r"fairseq\.", FutureWarning),
    # fairseq's self-attention in the decoder: a float causal mask with a bool padding mask.
    (r"Support for mismatched key_padding_mask and attn_mask is deprecated", r"torch\.nn\.", UserWarning),
    # fairseq pins memory whether or not there is a GPU.
    (r"'pin_memory' argument is set as true but no accelerator is found", r"torch\.utils\.data", UserWarning),
    # Set by --trust-checkpoint.
    (r"Environment variable TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD detected", r"fairseq\.", UserWarning),
)


def filter_harmless_warnings() -> None:
    """Ignore the warnings above, unless ``-W`` or PYTHONWARNINGS is set."""
    if sys.warnoptions:
        return
    for message, module, category in HARMLESS_WARNINGS:
        warnings.filterwarnings("ignore", message=message, category=category, module=module)
