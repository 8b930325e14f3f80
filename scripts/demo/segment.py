"""Learn a joint sentencepiece model and segment a parallel corpus with it.

    python segment.py DATA OUT --langs en ro --vocab-size 4000

Reads DATA/{train,valid,test}.LANG (plain text) and writes OUT/spm.model and OUT/{train,valid,test}.LANG. The
result is deterministic.
"""

import argparse
import io
from pathlib import Path

import sentencepiece

from surface_fusion.io.atomic_write import atomic_write, write_text
from surface_fusion.io.lines import read_lines

SPLITS = ("train", "valid", "test")


def learn(texts: list[Path], model: Path, vocab_size: int) -> sentencepiece.SentencePieceProcessor:
    """Train a unigram model without special symbols (fairseq's dictionary has its own).

    Raises:
        ValueError: sentencepiece rejects *vocab_size*; the message gives the reason.
    """
    written = io.BytesIO()
    try:
        sentencepiece.SentencePieceTrainer.train(
            input=[str(text) for text in texts],
            model_writer=written,
            vocab_size=vocab_size,
            character_coverage=1.0,
            unk_id=0,
            bos_id=-1,
            eos_id=-1,
            pad_id=-1,
            num_threads=1,
            minloglevel=2,
        )
    except RuntimeError as error:
        # Without the position in sentencepiece's source that precedes the message.
        raise ValueError(str(error).splitlines()[0].rpartition("] ")[2]) from None
    with atomic_write(model) as file:
        file.write(written.getvalue())
    return sentencepiece.SentencePieceProcessor(model_file=str(model))


def encode(processor: sentencepiece.SentencePieceProcessor, text: Path, out: Path) -> None:
    """Write the pieces of each line of *text* to *out*; only a line feed ends a line."""
    lines = read_lines(text)
    write_text(out, "".join(" ".join(pieces) + "\n" for pieces in processor.encode(lines, out_type=str)))


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("data", type=Path)
    parser.add_argument("out", type=Path)
    parser.add_argument("--langs", nargs=2, default=("en", "ro"))
    parser.add_argument("--vocab-size", type=int, default=4000)
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    train = [args.data / f"train.{lang}" for lang in args.langs]
    try:
        processor = learn(train, args.out / "spm.model", args.vocab_size)
    except ValueError as error:
        raise SystemExit(f"segment.py: --vocab-size {args.vocab_size}: {error}") from None
    for split in SPLITS:
        for lang in args.langs:
            encode(processor, args.data / f"{split}.{lang}", args.out / f"{split}.{lang}")


if __name__ == "__main__":
    main()
