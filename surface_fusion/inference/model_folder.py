"""Find the files in the folder of a trained model that translating raw text needs."""

from pathlib import Path
from typing import NamedTuple

from surface_fusion.data.subwords import marks_of_words
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.io.lines import read_lines

CODES = ("code", "codes", "*.codes", "*.code", "codes.*", "bpecodes")
"""Names of files with the merge operations of subword-nmt."""


class ModelFolder(NamedTuple):
    """The files of a model."""

    checkpoint: Path
    dictionaries: Path
    """Folder of the two ``dict.*.txt``."""
    subwords: Path | None
    """The model that segments text, None if the dictionary has words or characters."""
    bpe: str | None
    """Its name in fairseq, the value of ``--bpe``: ``sentencepiece``, ``subword_nmt`` or None."""

    @property
    def bpe_settings(self) -> dict[str, str]:
        """The settings by which fairseq's hub segments text."""
        if self.bpe is None:
            return {}
        return {"bpe": self.bpe, BPE_FILES[self.bpe]: str(self.subwords)}


BPE_FILES = {"sentencepiece": "sentencepiece_model", "subword_nmt": "bpe_codes"}
"""Value of ``--bpe`` -> name of the setting with its file."""


def find_model(folder: Path, checkpoint: str | None = None) -> ModelFolder:
    """Find the files of the model in *folder*, or its subfolders checkpoints, data-bin and pieces.

    The marks of subwords in the dictionary decide which model segments text: a sentencepiece model
    ``*.model``, the codes of subword-nmt (:data:`CODES`), or none.

    Args:
        folder: the model's folder.
        checkpoint: name of the checkpoint; by default ``checkpoint_best.pt`` or ``checkpoint_last.pt``.

    Raises:
        SurfaceFusionError: a file is missing or there are several candidates; the message says which.
    """
    if not folder.is_dir():
        raise SurfaceFusionError(f"model folder {folder} does not exist")
    names = (checkpoint,) if checkpoint else ("checkpoint_best.pt", "checkpoint_last.pt")
    candidates = [folder / sub / name for name in names for sub in ("", "checkpoints")]
    path = next((path for path in candidates if path.is_file()), None)
    if path is None:
        raise SurfaceFusionError(f"{folder} and its folder checkpoints have no {' or '.join(names)}")
    data = next((p for p in (folder, folder / "data-bin") if len([*p.glob("dict.*.txt")]) == 2), None)
    if data is None:
        raise SurfaceFusionError(f"neither {folder} nor its folder data-bin has two files dict.*.txt")
    lines = [line for file in sorted(data.glob("dict.*.txt")) for line in read_lines(file)]
    marks = marks_of_words(line.rpartition(" ")[0] for line in lines)
    if marks is None:
        return ModelFolder(path, data, None, None)
    bpe, kind, patterns = {
        "sentencepiece": ("sentencepiece", "sentencepiece models *.model", ("*.model",)),
        "@@ ": ("subword_nmt", "files with subword-nmt codes, such as bpe.codes", CODES),
    }[marks]
    places = (folder, folder / "pieces")
    found = sorted({file for pattern in patterns for place in places for file in place.glob(pattern)})
    if len(found) != 1:
        raise SurfaceFusionError(f"{folder} and its folder pieces have {len(found)} {kind}; one is needed")
    return ModelFolder(path, data, found[0], bpe)
