"""Folders of small trained models, laid out as the demo's."""

import io
from pathlib import Path
from typing import Any, Literal

import sentencepiece

from surface_fusion.cli.main import main
from tests.helpers.small_training import OPTIMISER, SIZES, TEXT

FUSION = ("-a", "transformer_surface_fusion", *SIZES, "--surfacefusion", "att", "--sf-gate", "0.8")
Subwords = Literal["sentencepiece", "subword_nmt", "words"]


def train_model_folder(folder: Path, subwords: Subwords = "sentencepiece") -> Path:
    """Segment the text, train five updates in *folder* with 60 source positions, and return *folder*."""
    pieces = folder / "pieces"
    pieces.mkdir()
    segment = {"sentencepiece": _sentencepiece, "subword_nmt": _subword_nmt, "words": lambda _: str.strip}
    segmented = segment[subwords](pieces)
    for name in ("train.en", "train.ro"):
        lines = (TEXT / name).read_text(encoding="utf-8").splitlines()
        (pieces / name).write_text("".join(segmented(line) + "\n" for line in lines), encoding="utf-8")
    data = ("-s", "en", "-t", "ro", "--joined-dictionary", "--trainpref", pieces / "train")
    assert main([*map(str, ("preprocess", *data, "--destdir", folder / "data-bin"))]) == 0
    training = ("--max-update", 5, "--disable-validation", "--no-epoch-checkpoints")
    argv = ("train", folder / "data-bin", *FUSION, *OPTIMISER, *training, "--max-source-positions", 60)
    argv += ("--max-target-positions", 30)  # a model of five updates never ends a sentence
    assert main([*map(str, (*argv, "--save-dir", folder / "checkpoints"))]) == 0
    return folder


def _sentencepiece(folder: Path) -> Any:
    sentencepiece.SentencePieceTrainer.train(
        input=[str(TEXT / f"train.{lang}") for lang in ("en", "ro")],
        model_prefix=str(folder / "spm"),
        vocab_size=300,
        hard_vocab_limit=False,
        bos_id=-1,
        eos_id=-1,
        minloglevel=2,
    )
    processor = sentencepiece.SentencePieceProcessor(model_file=str(folder / "spm.model"))
    return lambda line: " ".join(processor.encode(line, out_type=str))


def _subword_nmt(folder: Path) -> Any:
    from subword_nmt import apply_bpe, learn_bpe

    text = "".join((TEXT / f"train.{lang}").read_text(encoding="utf-8") for lang in ("en", "ro"))
    with open(folder / "bpe.codes", "w", encoding="utf-8") as codes:
        learn_bpe.learn_bpe(io.StringIO(text), codes, 100)
    with open(folder / "bpe.codes", encoding="utf-8") as codes:
        return apply_bpe.BPE(codes).process_line
