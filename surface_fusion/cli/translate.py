"""``surface-fusion translate MODEL_DIR``: translate raw text from standard input, line by line."""

import io
import logging
import math
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from surface_fusion.analysis.explain import explain, loaded_pair
from surface_fusion.cli.checkpoint_flags import add_checkpoint_flags, import_user_dir, trusted_checkpoints
from surface_fusion.cli.user_errors import OneLineParser
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.io.lines import batches_of_lines
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel

MAX_LINES = 64  # per call of the model; fewer if the input pauses


def _parser() -> OneLineParser:
    parser = OneLineParser(
        "translate",
        "MODEL_DIR [flags] < TEXT",
        description="Translates each line of standard input to a line of standard output. MODEL_DIR (or its "
        "subfolders checkpoints, data-bin, pieces) holds checkpoint_best.pt or checkpoint_last.pt, the two "
        "dict.*.txt, and the sentencepiece model *.model used to segment the training text.",
    )
    add = parser.add_argument
    add("folder", metavar="MODEL_DIR", type=Path, help="folder of the model, such as runs/demo")
    add("--checkpoint", metavar="NAME", help="name of another checkpoint in the folder")
    add("--beam", type=int, default=4, metavar="N", help="beam size; default: 4")
    add(
        "--explain",
        action="store_true",
        help="print a table below each translation: the prediction of each branch for each token, and the "
        "source token with the most attention",
    )
    add(
        "-o",
        "--out",
        type=Path,
        metavar="DIR",
        help="--explain: also write tables and heat maps, DIR/1 for line 1",
    )
    add("--cpu", action="store_true", help="use the CPU even if a GPU is available")
    add_checkpoint_flags(parser)
    return parser


class ModelFiles(NamedTuple):
    """The checkpoint, the folder of its dictionaries, and the sentencepiece model."""

    checkpoint: Path
    dictionaries: Path
    sentencepiece: Path


def find_files(folder: Path, checkpoint: str | None = None) -> ModelFiles:
    """Find the files of the model in *folder*.

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
    models = sorted([*folder.glob("*.model"), *(folder / "pieces").glob("*.model")])
    if len(models) != 1:
        raise SurfaceFusionError(
            f"{folder} and its folder pieces have {len(models)} sentencepiece models *.model; one is needed"
        )
    return ModelFiles(path, data, models[0])


def run(argv: Sequence[str]) -> None:
    """Translate standard input."""
    parser = _parser()
    args = parser.parse_args(argv)
    import_user_dir(args.user_dir)
    if args.beam < 1:
        parser.error(f"--beam {args.beam}: give 1 or more")
    if args.out is not None and not args.explain:
        parser.error("-o needs --explain")
    if args.out is not None and args.out.exists() and not args.out.is_dir():
        parser.error(f"-o {args.out} is a file; give a folder")
    if sys.stdin is None:
        raise SurfaceFusionError("standard input is closed; give the text there, as in: < TEXT")
    if sys.stdout is None:
        raise SurfaceFusionError("standard output is closed; the translations go there, as in: > FILE")
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(encoding="utf-8")  # as the input, independent of the locale
    logging.basicConfig(format="surface-fusion translate: %(message)s")  # for warnings about single lines
    checkpoint, dictionaries, sentencepiece = find_files(args.folder, args.checkpoint)
    with trusted_checkpoints(args.trust_checkpoint):
        hub = SurfaceFusionModel.from_pretrained(
            str(checkpoint.parent),
            checkpoint.name,
            str(dictionaries.absolute()),  # the hub takes ./ and ../ as relative to the checkpoint
            bpe="sentencepiece",
            sentencepiece_model=str(sentencepiece),
        )
    hub.eval()
    if torch.cuda.is_available() and not args.cpu:
        hub.cuda()
    first_line = 1
    for batch in batches_of_lines(sys.stdin, 1 if args.explain or sys.stdin.isatty() else MAX_LINES):
        rows = [hub.encode(line.strip()) for line in batch]
        results = hub.generate(rows, args.beam, first_line=first_line)
        for number, (row, (best, *_)) in enumerate(zip(rows, results, strict=True), first_line):
            tokens = best["tokens"].cpu()
            print(hub.decode(tokens), flush=True)
            if args.explain and best["score"] > -math.inf:
                pair = loaded_pair(hub.models[0], hub.task, row, tokens)
                for line in explain(pair, args.out and args.out / str(number)):
                    print(f"    {line}", flush=True)
        first_line += len(batch)
