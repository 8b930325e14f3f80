"""Data files and archives run nothing and write nowhere else."""

import gc
import io
import tarfile
from pathlib import Path
from typing import Any

import pytest
from fairseq import file_utils, hub_utils
from fairseq.data import Dictionary, FastaDataset, data_utils
from fairseq.data.audio.data_cfg import S2TDataConfig, get_config_from_yaml

from surface_fusion import SurfaceFusionError

FASTA = b">first one\nACDE\nFG\n>second\nHIK  \n\n>third\r\nLMNPQ\r\n"


def test_no_part_of_a_fasta_files_name_reaches_a_shell(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    prefix = "train.$(touch marker)"
    Path(f"{prefix}.fasta").write_bytes(FASTA)
    assert data_utils.load_indexed_dataset(prefix, Dictionary()) is not None
    assert not Path("marker").exists()


def test_a_fasta_file_is_indexed(tmp_path: Path) -> None:
    (tmp_path / "train.fasta").write_bytes(FASTA)
    data = FastaDataset(str(tmp_path / "train"))
    assert [data[i] for i in range(len(data))] == [
        (">first one", "ACDEFG"),
        (">second", "HIK"),
        (">third", "LMNPQ"),
    ]
    assert data.offsets.tolist() == [0, 19, 34] and data.sizes.tolist() == [6, 3, 5]
    assert data.offsets.dtype == data.sizes.dtype == "int64"


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_missing_fasta_file_is_an_error_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        FastaDataset(str(tmp_path / "train"))
    gc.collect()  # its __del__ fails


@pytest.mark.parametrize("tag", ["object/apply:os.system", "object/new:os.system", "name:os.system"])
def test_no_yaml_tag_names_code(tmp_path: Path, tag: str) -> None:
    config = tmp_path / "config.yaml"
    config.write_text(f"vocab_filename: !!python/{tag} ['touch {tmp_path / 'marker'}']\n")
    with pytest.raises(SurfaceFusionError, match=r"config\.yaml is not plain YAML"):
        S2TDataConfig(config)
    assert not (tmp_path / "marker").exists()


def test_plain_yaml_is_read(tmp_path: Path) -> None:
    config = tmp_path / "config.yaml"
    config.write_text("vocab_filename: dict.txt\ninput_channels: 2\ntransforms:\n  '*': [utterance_cmvn]\n")
    assert get_config_from_yaml(config) == {
        "vocab_filename": "dict.txt",
        "input_channels": 2,
        "transforms": {"*": ["utterance_cmvn"]},
    }
    with pytest.raises(FileNotFoundError, match=r"nowhere\.yaml not found"):
        get_config_from_yaml(tmp_path / "nowhere.yaml")


def archive(path: Path, *members: str, link: str | None = None) -> Path:
    """A model archive with the files *members*, and a link to *link*."""
    with tarfile.open(path, "w:gz") as file:
        for name in members:
            member = tarfile.TarInfo(name)
            member.size = 4
            file.addfile(member, io.BytesIO(b"text"))
        if link is not None:
            member = tarfile.TarInfo("model/link")
            member.type, member.linkname = tarfile.SYMTYPE, link
            file.addfile(member)
    return path


@pytest.mark.parametrize(
    ("members", "link"),
    [
        (["model/dict.txt", "../outside"], None),
        (["{folder}/outside"], None),
        (["model/dict.txt"], "../../outside"),
        (["model/dict.txt"], "{folder}/outside"),
    ],
)
def test_no_archive_writes_outside_of_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, members: list[str], link: str | None
) -> None:
    inside = tmp_path / "tmp" / "inside"
    inside.mkdir(parents=True)
    monkeypatch.setattr("tempfile.mkdtemp", lambda: str(inside))
    names = [name.format(folder=tmp_path) for name in members]
    path = archive(tmp_path / "model.tar.gz", *names, link=link and link.format(folder=tmp_path))
    before: Any = vars(tarfile.TarFile)["extraction_filter"]
    with pytest.raises(SurfaceFusionError, match=r"model\.tar\.gz was not extracted: "):
        hub_utils.from_pretrained(str(path))
    assert not list(tmp_path.rglob("outside")) and path.exists()
    assert vars(tarfile.TarFile)["extraction_filter"] is before


def test_an_ordinary_archive_is_extracted_in_its_place(tmp_path: Path) -> None:
    path = archive(tmp_path / "model.tar.gz", "model/dict.txt", "model/model.pt")
    folder = Path(file_utils.load_archive_file(str(path)))
    assert sorted(child.name for child in folder.iterdir()) == ["dict.txt", "model.pt"]
    assert file_utils.load_archive_file(str(folder)) == str(folder)
