"""The files of a model are found by the marks of its dictionary; what is missing is named."""

from pathlib import Path

import pytest

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.inference.model_folder import find_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("checkpoint_last.pt", "dict.en.txt", "dict.ro.txt"):
        (tmp_path / name).touch()
    return tmp_path


@pytest.mark.parametrize("name", ["code", "codes", "bpe.codes", "codes.joint", "pieces/bpe.codes"])
def test_codes_belong_to_dictionaries_with_at_signs(folder: Path, name: str) -> None:
    (folder / "dict.en.txt").write_text("lo@@ 3\nw 2\n", encoding="utf-8")
    with pytest.raises(SurfaceFusionError, match="0 files with subword-nmt codes, such as"):
        find_model(folder)
    (folder / "pieces").mkdir()
    (folder / name).touch()
    files = find_model(folder)
    assert files.bpe_settings == {"bpe": "subword_nmt", "bpe_codes": str(folder / name)}


def test_a_sentencepiece_model_belongs_to_dictionaries_with_its_marks(folder: Path) -> None:
    (folder / "dict.ro.txt").write_text("\u2581a 3\n", encoding="utf-8")
    for name in ("a.model", "b.model"):
        (folder / name).touch()
    with pytest.raises(SurfaceFusionError, match=r"2 sentencepiece models \*\.model; one is needed"):
        find_model(folder)
    (folder / "b.model").unlink()
    assert find_model(folder).bpe_settings["sentencepiece_model"] == str(folder / "a.model")


def test_words_need_no_model(folder: Path) -> None:
    (folder / "dict.en.txt").write_text("email@ 3\nword 2\n", encoding="utf-8")
    files = find_model(folder)
    assert (files.subwords, files.bpe_settings) == (None, {})
    assert files.checkpoint.name == "checkpoint_last.pt"


def test_what_is_missing_is_named(tmp_path: Path) -> None:
    with pytest.raises(SurfaceFusionError, match=r"model folder .*nowhere does not exist"):
        find_model(tmp_path / "nowhere")
    with pytest.raises(SurfaceFusionError, match=r"have no checkpoint_best\.pt or checkpoint_last\.pt"):
        find_model(tmp_path)
    (tmp_path / "checkpoint_last.pt").touch()
    with pytest.raises(SurfaceFusionError, match=r"nor its folder data-bin has two files dict\.\*\.txt"):
        find_model(tmp_path)
    for language in ("en", "ro"):
        (tmp_path / f"dict.{language}.txt").write_text("\u2581a 1\n", encoding="utf-8")
    with pytest.raises(SurfaceFusionError, match="have 0 sentencepiece models"):
        find_model(tmp_path)
    (tmp_path / "spm.model").touch()
    assert find_model(tmp_path).subwords == tmp_path / "spm.model"
    (tmp_path / "checkpoint_best.pt").touch()
    assert find_model(tmp_path).checkpoint.name == "checkpoint_best.pt"
    assert find_model(tmp_path, "checkpoint_last.pt").checkpoint.name == "checkpoint_last.pt"
