"""Data files and archives that fairseq reads in ways that run code or write anywhere."""

import os
import platform
import tarfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fairseq import file_utils
from fairseq.data import fasta_dataset
from fairseq.data.audio import data_cfg

from surface_fusion.compat.patching import wrap
from surface_fusion.errors import SurfaceFusionError


def index_fasta_without_shell() -> None:
    """Index ``.fasta`` files in Python; fairseq writes their path, unquoted, into a shell command.

    A file named ``train.$(command).fasta`` in a data folder runs the command in plain fairseq.
    """
    wrap(fasta_dataset.FastaDataset, "_build_index", _build_index)


def _build_index(original: Callable[..., Any], self: Any, path: str) -> tuple[Any, Any]:
    """Byte offsets of the records of ``path.fasta``, and the lengths of their sequences, as int64."""
    offsets, sizes, position = [], [], 0
    with open(fasta_dataset.fasta_file_path(path), "rb") as file:
        for line in file:
            if line.startswith(b">"):
                offsets.append(position)
                sizes.append(0)
            elif sizes:
                sizes[-1] += len(line.strip())
            position += len(line)
    return np.array(offsets, dtype=np.int64), np.array(sizes, dtype=np.int64)


def read_yaml_safely() -> None:
    """Read the data configuration of speech tasks with YAML's safe loader.

    fairseq uses ``yaml.FullLoader``, which calls what the file names before PyYAML 5.4, and looks up names in
    imported modules since.
    """
    wrap(data_cfg, "get_config_from_yaml", _get_config_from_yaml)


def _get_config_from_yaml(original: Callable[..., Any], yaml_path: Path) -> Any:
    if not yaml_path.is_file():
        return original(yaml_path)  # its error
    try:
        with open(yaml_path) as file:
            return yaml.safe_load(file)
    except yaml.YAMLError as error:
        raise SurfaceFusionError(f"{yaml_path} is no plain YAML: {error}") from error


def extract_archives_inside() -> None:
    """Refuse a model archive whose members lie outside of it.

    ``from_pretrained("model.tar.gz")`` extracts with Python's default before 3.14, which writes a member
    named ``../../.bashrc`` where it says.
    """
    wrap(file_utils, "load_archive_file", _load_archive_file)


def _only_inside(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    # data_filter makes absolute names relative, but fairseq then moves what is at the absolute one.
    if os.path.isabs(member.name):
        raise tarfile.AbsolutePathError(member)
    return tarfile.data_filter(member, path)


def _load_archive_file(original: Callable[..., Any], archive_file: str) -> Any:
    if os.path.isdir(archive_file):
        return original(archive_file)
    if not hasattr(tarfile, "data_filter"):
        raise SurfaceFusionError(
            f"archive {archive_file} cannot be extracted safely by Python {platform.python_version()}; "
            "extract it yourself and give the folder"
        )
    archives: Any = tarfile.TarFile
    before = vars(archives)["extraction_filter"]
    archives.extraction_filter = staticmethod(_only_inside)
    try:
        return original(archive_file)
    except tarfile.FilterError as error:
        raise SurfaceFusionError(
            f"archive {archive_file} is not extracted, as {error}; give a folder, or another archive"
        ) from error
    finally:
        archives.extraction_filter = before
