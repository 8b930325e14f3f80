"""Load checkpoints with torch's safe unpickler and report unreadable files in one line."""

import argparse
import collections
import pickle
import re
import sys
import typing
from typing import Any

import numpy as np
import omegaconf
import torch
from fairseq.distributed import utils as distributed_utils
from fairseq.models.transformer import transformer_config

from surface_fusion.compat.checkpoint_integrity import DamagedCheckpointError
from surface_fusion.compat.patching import Original, repair
from surface_fusion.errors import SurfaceFusionError

TRUST_VARIABLE = "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD"
"""torch's environment variable that allows arbitrary pickles in checkpoints when it is 1."""

TRUST_ADVICE = (
    "; if you trust the file, load it with --trust-checkpoint (surface-fusion) or "
    f"{TRUST_VARIABLE}=1 (fairseq commands)"
)
"""The end of the error for a checkpoint that needs trust."""


def allow_checkpoint_classes() -> None:
    """Register the classes in fairseq's checkpoints with torch's safe unpickler (fs 5610, 5603).

    torch >= 2.6 refuses unknown classes. Namespace holds the arguments; numpy, under its names in versions 1
    and 2, the BLEU values of ``--eval-bleu``. omegaconf and the rest are needed to resume with several
    processes, which pass the whole state through ``torch.load``.
    """
    # numpy 1.26 has a numpy._core too, but an incomplete one.
    multiarray = sys.modules.get("numpy._core.multiarray") or sys.modules["numpy.core.multiarray"]
    numpy_functions = [
        (getattr(multiarray, name), f"numpy.{core}.multiarray.{name}")
        for core in ("core", "_core")
        for name in ("_reconstruct", "scalar")
    ]
    numpy_dtypes = [type(np.dtype(code)) for code in ("f2", "f4", "f8", "i4", "i8", "u4", "u8", "?")]
    classes: list[Any] = [
        *(argparse.Namespace, collections.defaultdict, typing.Any, dict, list, int),
        *(np.ndarray, np.dtype, *numpy_functions, *numpy_dtypes),
        *(omegaconf.DictConfig, omegaconf.ListConfig, omegaconf.nodes.AnyNode),
        *(omegaconf.base.ContainerMetadata, omegaconf.base.Metadata),
        *(transformer_config.TransformerConfig, transformer_config.EncDecBaseConfig),
        *(transformer_config.DecoderConfig, transformer_config.QuantNoiseConfig),
        distributed_utils._TensorPlaceholder,
    ]
    torch.serialization.add_safe_globals(classes)


@repair(
    "fairseq.checkpoint_utils.load_checkpoint_to_cpu",
    probe="foreign_checkpoint_is_not_named",
    report="fs 5610, 5603",
)
def explain_bad_checkpoint(
    load: Original, path: str, arg_overrides: Any = None, *args: Any, **kwargs: Any
) -> Any:
    """Name a file that is missing, damaged, no checkpoint or not a safe one, in one line, not a traceback."""
    if arg_overrides is not None and not isinstance(arg_overrides, dict):
        raise SurfaceFusionError(
            f"--model-overrides {arg_overrides} is not a dictionary; give one, such as \"{{'sf_gate': 0.9}}\""
        )
    try:
        return load(path, arg_overrides, *args, **kwargs)
    except FileNotFoundError:
        raise SurfaceFusionError(f"checkpoint {path} does not exist; check the path") from None
    except IsADirectoryError:
        raise SurfaceFusionError(f"checkpoint {path} is a folder; give a file in it") from None
    except PermissionError:
        raise SurfaceFusionError(f"checkpoint {path} cannot be read; check its permissions") from None
    except SurfaceFusionError:
        raise
    except Exception as error:  # torch raises various exceptions on malformed files
        unknown = re.search(r"GLOBAL (\S+)", str(error))
        if isinstance(error, pickle.UnpicklingError) and unknown is not None:
            raise SurfaceFusionError(
                f"checkpoint {path} wants to run code of {unknown[1]}, which is not on the list of safe "
                f"classes{TRUST_ADVICE}"
            ) from error
        raise DamagedCheckpointError(
            f"checkpoint {path} is truncated or not a fairseq checkpoint ({type(error).__name__}); give "
            "a file that fairseq-train wrote"
        ) from error


@repair("fairseq.checkpoint_utils._upgrade_state_dict", probe="published_checkpoint_is_plain")
def upgrade_published_checkpoint(upgrade: Original, state: Any) -> Any:
    """Load checkpoints of the published code as this package's model; they name one of fairseq's.

    A file without a model raises KeyError, which :func:`explain_bad_checkpoint` reports.
    """
    if not isinstance(state, dict) or "model" not in state:
        raise KeyError("model")
    args: Any = state.get("args")
    if hasattr(args, "sf_fuision_mode") and not str(args.arch).startswith("transformer_surface_fusion"):
        args.arch = "transformer_surface_fusion"
    return upgrade(state)
