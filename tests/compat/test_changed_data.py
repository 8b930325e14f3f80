"""Data that is removed or changed under a training is noticed when the epoch ends."""

import os
import shutil
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils

from surface_fusion import SurfaceFusionError
from surface_fusion.compat.changed_data import check_data_files

DATA = Path(__file__).parents[1] / "reference_checkpoint" / "data-bin"


@pytest.mark.parametrize(
    ("what", "said"), [("remove", "removed"), ("replace", "changed"), ("touch", "changed")]
)
def test_it_is_named(tmp_path: Path, what: str, said: str) -> None:
    folder = tmp_path / "data-bin"
    shutil.copytree(DATA, folder)
    dictionary = Dictionary.load(str(folder / "dict.en.txt"))
    data = data_utils.load_indexed_dataset(str(folder / "train.en-xx.en"), dictionary)
    check_data_files()
    file = folder / "train.en-xx.en.bin"
    if what == "remove":
        shutil.rmtree(folder)
    elif what == "replace":
        shutil.copy2(file, folder / "new")
        os.replace(folder / "new", file)
    else:
        os.utime(file)
    with pytest.raises(SurfaceFusionError, match=rf"data file .*train\.en-xx\.en\.bin was {said}"):
        check_data_files()
    assert len(data) == 2600
    del data
    check_data_files()  # a data set that is gone is nobody's
