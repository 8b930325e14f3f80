"""Read data files and archives without running code or writing outside of the target folder."""

import os
import platform
import tarfile
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from fairseq.data import fasta_dataset

from surface_fusion.compat.patching import Original, repair, replaced
from surface_fusion.errors import SurfaceFusionError


@repair("fairseq.data.fasta_dataset.FastaDataset._build_index", probe="fasta_name_reaches_shell")
def index_fasta_without_shell(build_index: Original, dataset: Any, path: str) -> tuple[Any, Any]:
    """Index a FASTA file in Python; fairseq passes its unquoted name to a shell, which runs commands in it.

    Returns:
        Byte offsets of the records of ``path.fasta``, and the lengths of their sequences, as int64.
    """
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


@repair("fairseq.data.audio.data_cfg.get_config_from_yaml", probe="yaml_names_code")
def read_yaml_safely(get_config: Original, yaml_path: Path) -> Any:
    """Read the YAML of speech data with the safe loader; in fairseq it may name Python objects.

    fairseq uses ``yaml.FullLoader``. Before PyYAML 5.4 it calls functions that the file names; later versions
    look up names in imported modules.
    """
    if not yaml_path.is_file():
        return get_config(yaml_path)  # its error
    try:
        with open(yaml_path) as file:
            return yaml.safe_load(file)
    except yaml.YAMLError as error:
        raise SurfaceFusionError(f"{yaml_path} is not plain YAML: {error}") from error


def _only_inside(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
    # data_filter makes absolute names relative, but fairseq then moves the file with the absolute name.
    if os.path.isabs(member.name):
        raise tarfile.AbsolutePathError(member)
    return tarfile.data_filter(member, path)


@repair("fairseq.file_utils.load_archive_file", probe="archive_writes_anywhere")
def extract_archive_inside(load_archive: Original, archive_file: str) -> Any:
    """Refuse members of a model archive that would be written outside of the target folder.

    fairseq extracts with Python's default filter, which before Python 3.14 writes a member named
    ``../../.bashrc`` outside of the folder.
    """
    if os.path.isdir(archive_file):
        return load_archive(archive_file)
    if not hasattr(tarfile, "data_filter"):
        raise SurfaceFusionError(
            f"archive {archive_file} cannot be extracted safely by Python {platform.python_version()}; "
            "extract it yourself and give the folder"
        )
    archives: Any = tarfile.TarFile
    try:
        with replaced(archives, "extraction_filter", staticmethod(_only_inside)):
            return load_archive(archive_file)
    except tarfile.FilterError as error:
        raise SurfaceFusionError(
            f"archive {archive_file} was not extracted: {error}; give a folder or another archive"
        ) from error
