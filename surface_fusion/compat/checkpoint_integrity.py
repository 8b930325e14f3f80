"""Verify checksums and finiteness of checkpoints.

torch stores a CRC-32 per record but does not verify it: a flipped bit is loaded as a weight. Here it is
verified before a file is loaded, which takes 0.1 s for 60 million fp32 parameters. Files without checksums
(torch before 1.6, or ``torch.serialization.set_crc32_options(False)``) are loaded unchecked.
"""

import contextlib
import math
import os
import re
import zipfile
import zlib
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import torch
from fairseq.file_io import PathManager
from torch import Tensor

from surface_fusion.compat.patching import Original, repair
from surface_fusion.errors import SurfaceFusionError

NO_VALUES = re.compile(r"mask|\._float_tensor$", re.IGNORECASE)
"""Names of masks, where infinity has a meaning, and of a buffer that fairseq never sets or reads."""


class DamagedCheckpointError(SurfaceFusionError):
    """A checkpoint is truncated, or its content differs from what was written."""


class NotFiniteError(SurfaceFusionError):
    """A checkpoint contains NaN or infinity.

    Attributes:
        state: the checkpoint.
    """

    def __init__(self, path: str, tensor: str, state: Any, in_optimizer: bool) -> None:
        advice = "add --reset-optimizer" if in_optimizer else "use an older checkpoint"
        super().__init__(f"checkpoint {path}: {tensor}; {advice}")
        self.state = state


uses_optimizer: ContextVar[bool] = ContextVar("uses_optimizer", default=False)
"""Whether the optimizer's state in the loaded checkpoint is used, which only the trainer does."""


@repair("fairseq.checkpoint_utils.load_checkpoint_to_cpu", probe="flipped_bit_is_loaded")
def load_intact(load: Original, path: str, *args: Any, **kwargs: Any) -> Any:
    """Refuse a checkpoint with flipped bits or NaN, which fairseq loads without an error.

    Raises:
        DamagedCheckpointError: the file is damaged.
        NotFiniteError: a tensor contains NaN or infinity.
    """
    intact = check_records(path)
    try:
        state = load(path, *args, **kwargs)
    except DamagedCheckpointError as error:
        if intact:  # but not a checkpoint
            raise SurfaceFusionError(str(error)) from error
        raise
    tensor = not_finite(state, optimizer=uses_optimizer.get())
    if tensor is not None:
        raise NotFiniteError(path, tensor, state, in_optimizer=not_finite(state, optimizer=False) is None)
    return state


@repair("fairseq.checkpoint_utils.load_ema_from_checkpoint", probe="flipped_bit_is_loaded_as_ema")
def load_intact_ema(load: Original, path: str) -> Any:
    """Refuse a checkpoint with flipped bits of which the moving average is loaded."""
    check_records(path)
    return load(path)


# -- records ------------------------------------------------------------------------------------


def check_records(path: str) -> bool:
    """Verify the checksums in the file *path*.

    Returns:
        Whether it has checksums.

    Raises:
        DamagedCheckpointError: a record does not match its checksum; with the parameter's name if known.
    """
    if PathManager.path_requires_pathmanager(path) or not os.path.isfile(path):
        return False
    try:
        if not zipfile.is_zipfile(path):
            return False
        with zipfile.ZipFile(path) as archive:
            records = [r for r in archive.infolist() if r.compress_type == zipfile.ZIP_STORED]
            checksums = {record.CRC for record in records}
            if not any(checksums):
                return False
            damaged = next((r.filename for r in records if not _matches_checksum(archive, r)), None)
    except PermissionError:
        return False  # reported by loading
    except Exception as error:  # zipfile raises various exceptions on damaged headers
        raise _damaged(path, f"its table of contents cannot be read ({type(error).__name__})") from error
    if damaged is not None:
        names = [] if damaged.endswith("/data.pkl") else _tensors_without(checksums, path)
        if len(names) > 2:  # tensors in one storage, such as those of flat_adam on a CPU
            names[2:] = [f"{len(names) - 2} more tensors in the same storage"]
        raise _damaged(path, f"checksum mismatch in {', '.join(names) or damaged}")
    return True


def _damaged(path: str, what: str) -> DamagedCheckpointError:
    return DamagedCheckpointError(
        f"checkpoint {path} is damaged: {what}; give another checkpoint, or copy the file again"
    )


def _matches_checksum(archive: zipfile.ZipFile, record: zipfile.ZipInfo) -> bool:
    """Whether the data of *record* have its size and its checksum, which zipfile verifies at the end."""
    try:
        with archive.open(record) as file:
            return sum(map(len, iter(lambda: file.read(1 << 22), b""))) == record.file_size
    except zipfile.BadZipFile:
        return False


def _tensors_without(checksums: set[int], path: str) -> list[str]:
    """Names of the tensors in *path* whose storage has none of the *checksums*."""
    with contextlib.suppress(Exception):
        state = torch.load(path, map_location="cpu", mmap=True)
        return [name for name, tensor in _named_tensors(state) if _checksum(tensor) not in checksums]
    return []


def _checksum(tensor: Tensor) -> int:
    """CRC-32 of the storage of *tensor*."""
    memory: Any = torch.tensor([], dtype=torch.uint8).set_(tensor.untyped_storage())
    return zlib.crc32(memory.numpy())


# -- values -------------------------------------------------------------------------------------


def not_finite(state: dict[str, Any], optimizer: bool = True) -> str | None:
    """Describe the first tensor of a checkpoint that contains NaN or infinity; None if there is none.

    Checks parameters and buffers, those of EMA, and with *optimizer* the optimizer state last. Names that
    match :data:`NO_VALUES` are skipped.
    """
    parts, extra = {"model": state.get("model")}, state.get("extra_state")
    if isinstance(extra, dict):
        parts |= {name: extra.get(name) for name in ("ema", "ema_fp32_params")}
    if optimizer:
        parts["last_optimizer_state"] = state.get("last_optimizer_state")
    for name, tensor in _named_tensors(parts):
        dense = tensor.layout is torch.strided and not tensor.is_meta  # as all parameters of fairseq
        if not (dense and tensor.is_floating_point() and tensor.numel()) or NO_VALUES.search(name):
            continue
        values = _each_once(tensor.detach())
        # Four times as fast as isfinite; aminmax returns NaN if there is one.
        if not all(math.isfinite(bound) for bound in torch.aminmax(values)):
            wrong = values.isfinite().logical_not()
            index = wrong.nonzero()[0].tolist()
            found = (
                f"{float(values[tuple(index)])} at {index}, {int(wrong.sum()):,} of {values.numel():,} values"
            )
            return f"{name} is not finite ({found})"
    return None


def _each_once(tensor: Tensor) -> Tensor:
    """*tensor*, or its storage if that is smaller: an expanded number may have the shape of terabytes."""
    if tensor.numel() * tensor.element_size() > tensor.untyped_storage().nbytes():
        tensor = torch.tensor([], dtype=tensor.dtype).set_(tensor.untyped_storage())  # type: ignore[call-overload]
    return tensor.float() if tensor.element_size() == 1 else tensor  # torch does not compare float8


_KINDS = {"model": "parameter", "last_optimizer_state": "optimizer state", "ema": "EMA parameter"}


def _named_tensors(state: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Names for messages, and tensors, of a checkpoint or of parts of one."""
    for part, value in state.items():
        for name, tensor in _walk(value):
            yield f"{_KINDS.get(part, part)} {name.removeprefix('.')}", tensor


def _walk(value: Any, name: str = "") -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        yield name, value
    elif isinstance(value, (dict, list, tuple)):
        for key, item in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _walk(item, f"{name}.{key}")
