"""Average the parameters of checkpoints (Vaswani et al., 2017, section 6.1).

The average of a training's last few checkpoints usually translates slightly better than each of them.
"""

import os
from collections.abc import Sequence
from typing import Any

from fairseq import checkpoint_utils
from omegaconf import OmegaConf
from torch import Tensor

from surface_fusion.compat.checkpoint_allowlist import check_configuration
from surface_fusion.errors import SurfaceFusionError


def average_checkpoints(paths: Sequence[str]) -> dict[str, Any]:
    """Return the last checkpoint of *paths* with its parameters replaced by the mean over *paths*.

    The mean is computed in float64 and cast to the dtypes of the last checkpoint, whose integer buffers are
    kept. Tensors that share memory still share it. The optimizer state is removed: use the result for
    generation or to initialise a new training (``--finetune-from-model``). The key ``averaged`` lists the
    file names; fairseq ignores it.

    Raises:
        SurfaceFusionError: *paths* is empty, a file is not safe to load, or two differ in the names or shapes
            of parameters.
    """
    if not paths:
        raise SurfaceFusionError("no checkpoint to average; give at least one")
    sums: dict[str, Tensor] = {}
    for path in paths:
        state = checkpoint_utils.load_checkpoint_to_cpu(path)
        check_configuration(state, path, with_task=False)
        model = state["model"]
        if path != paths[0]:
            _check_same_parameters(paths[0], sums, path, model)
        for name, value in model.items():
            sums[name] = sums[name] + value.double() if name in sums else value.double()
    state["model"] = _means(sums, len(paths), model)
    state["averaged"] = [os.path.basename(path) for path in paths]
    state["last_optimizer_state"] = None
    # The last checkpoint's exponential moving average is not one of the mean.
    state["extra_state"].pop("ema", None)
    if state.get("args") is not None:
        del state["cfg"]  # fairseq builds it from args when it loads the file
    else:
        state["cfg"] = OmegaConf.to_container(state["cfg"], resolve=True, enum_to_str=True)
    return state


def _check_same_parameters(first: str, sums: dict[str, Tensor], path: str, model: dict[str, Tensor]) -> None:
    for name in [*sums, *model]:
        if name not in model:
            fault = f"{path} lacks parameter {name}, which {first} has"
        elif name not in sums:
            fault = f"{path} has parameter {name}, which {first} lacks"
        elif (theirs := tuple(model[name].shape)) != (ours := tuple(sums[name].shape)):
            fault = f"parameter {name} has shape {theirs} in {path} but {ours} in {first}"
        else:
            continue
        raise SurfaceFusionError(f"{fault}; average checkpoints of one model")


def _means(sums: dict[str, Tensor], count: int, last: dict[str, Tensor]) -> dict[str, Tensor]:
    means, shared = dict(last), {}
    for name, value in last.items():
        if value.is_floating_point():
            memory = (value.data_ptr(), value.shape, value.stride()) if value.numel() else name
            if memory not in shared:
                shared[memory] = (sums[name] / count).to(value.dtype)
            means[name] = shared[memory]
    return means


def last_checkpoints(folder: str, count: int, by_update: bool) -> list[str]:
    """Return the paths of the last *count* checkpoints in *folder*, a ``--save-dir``, oldest first.

    They are those of epochs; if *by_update*, those of ``--save-interval-updates``.

    Raises:
        SurfaceFusionError: *folder* does not exist or holds fewer than *count* of them.
    """
    if not os.path.isdir(folder):
        raise SurfaceFusionError(
            f"checkpoint folder {folder} does not exist; give the --save-dir of a training"
        )
    if count < 1:
        raise SurfaceFusionError(f"{count} checkpoints to average; give a number of 1 or more")
    if by_update:
        name, pattern = "checkpoint_EPOCH_UPDATE.pt", r"checkpoint_\d+_(\d+)\.pt"
    else:
        name, pattern = "checkpointEPOCH.pt", r"checkpoint(\d+)\.pt"
    newest_first = checkpoint_utils.checkpoint_paths(folder, pattern)
    if len(newest_first) < count:
        raise SurfaceFusionError(
            f"{folder} has {len(newest_first)} files named {name}, not {count}; give a smaller number or "
            "name the files"
        )
    return newest_first[:count][::-1]
