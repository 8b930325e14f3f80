"""One experiment of translation: raw text is cut and binarised, a model trained, test sets translated."""

import argparse
import fcntl
import hashlib
import json
import os
import secrets
import shutil
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import product
from pathlib import Path
from typing import Any

from contenders import ONLY_LAST, OURS, PRECISION, SAMPLE, SIZES, child_environment, output_of
from results import add_common_flags, machine, positive, settle_common_flags

from surface_fusion.analysis.figures import save_text
from surface_fusion.cli.info import checkpoint_facts
from surface_fusion.io.lines import read_lines, split_lines
from surface_fusion.scoring import parse_generate_output

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
import segment

SUBSETS = {"valid": "valid", "core": "test", "newstest2016": "test1"}
"""Texts that can be translated, by the names that fairseq gives them."""

FILES = {"train": "core.train", "valid": "core.valid", "test": "core.test", "test1": "newstest2016"}
QUICK_FILES = {"train": "train", "valid": "valid", "test": "test", "test1": "test"}
"""The text behind each subset, without its language: of TEXT, and of the sample."""

SOURCE = "source.json"
"""In a data folder: what it was made of."""

OUTCOME = "outcome.json"
"""In a training's folder: what came of it."""

UNKNOWN = {"hardware": "unknown", "torch": "unknown"}
"""The machine of an outcome that does not say."""

FLAGS = ("size", "norm", "dropout", "lr", "updates", "max_tokens", "dtype", "vocab")
"""Of what a training was asked for, what has a flag of that name."""


@dataclass(frozen=True)
class Recipe:
    """What all trainings of a table share."""

    source: str
    target: str
    size: str
    """One of :data:`contenders.SIZES`."""
    norm: str
    """``pre`` or ``post``: LayerNorm before or after each sublayer."""
    dropout: float
    lr: float
    updates: int
    max_tokens: int
    dtype: str
    vocab: int
    """Units of sentencepiece, of both languages."""

    def setting(self) -> dict[str, object]:
        """What rows of the table say."""
        kept = asdict(self)
        return {"direction": f"{kept.pop('source')}-{kept.pop('target')}", **kept}

    def flags(self, data: Path, *, cpu: bool, workers: int) -> list[str]:
        """The command line of a training, but for its model, its seed and its place."""
        flags = [str(data), "-s", self.source, "-t", self.target, "--share-all-embeddings"]
        flags += [*SIZES[self.size], *PRECISION[self.dtype]]
        flags += ["--dropout", str(self.dropout), "--attention-dropout", "0", "--label-smoothing", "0.1"]
        flags += ["--adam-betas", "(0.9, 0.98)", "--lr-scheduler", "inverse_sqrt", "--warmup-init-lr", "1e-7"]
        flags += ["--lr", str(self.lr), "--warmup-updates", str(max(self.updates // 6, 1))]
        flags += ["--clip-norm", "1", "--max-tokens", str(self.max_tokens), "--max-update", str(self.updates)]
        flags += ["--no-progress-bar", "--log-format", "json", "--log-interval", "100"]
        flags += ["--disable-validation", "--num-workers", str(workers)]
        flags += ["--encoder-normalize-before", "--decoder-normalize-before"] if self.norm == "pre" else []
        return flags + (["--cpu"] if cpu else [])


@contextmanager
def work_folder(
    work: Path | None, languages: tuple[str, str], held: Iterable[str] | None = None
) -> Iterator[Path]:
    """The folder of a direction in *work*, or a temporary one, for this run alone.

    Args:
        held: trainings whose outcomes it must have already; then nothing is made, and others may use it.

    Raises:
        SystemExit: it cannot be made, another run works in it, or something that must be there is not.
    """
    if work is not None and held is not None:
        yield held_folder(work, languages, held)
        return
    with tempfile.TemporaryDirectory(prefix="bench-") as temporary:
        folder = Path(work or temporary) / "-".join(languages)
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SystemExit(f"--work {work}: {error.strerror}; give a folder") from None
        with open(folder / "lock", "w") as lock:
            try:
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                raise SystemExit(
                    f"another run works in {folder}; wait for it, or give another --work"
                ) from None
            yield folder


def held_folder(work: Path, languages: tuple[str, str], names: Iterable[str]) -> Path:
    """The folder of a direction in *work*.

    Raises:
        SystemExit: there is none, or it lacks the outcome of one of the trainings *names*.
    """
    folder = work / "-".join(languages)
    if not (folder / "data-bin" / SOURCE).is_file():
        raise SystemExit(
            f"--work {work}: {folder} holds no data-bin of these scripts; give a folder that trainings left"
        )
    missing = [name for name in names if not (folder / name / OUTCOME).is_file()]
    if missing:
        raise SystemExit(f"{folder} holds no {OUTCOME} of {', '.join(missing)}; leave out --score-only")
    return folder


def prepare(text: Path, folder: Path, languages: tuple[str, str], vocab: int, files: dict[str, str]) -> Path:
    """Cut and binarise *text* in *folder*, unless that is done: the data folder.

    Raises:
        SystemExit: a text is missing, *vocab* is too large for it, or *folder* was made of something else.
    """
    data = folder / "data-bin"
    texts = {
        f"{split}.{language}": text / f"{files[split]}.{language}"
        for split, language in product(files, languages)
    }
    missing = [str(path) for path in texts.values() if not path.is_file()]
    if missing:
        raise SystemExit(
            f"{', '.join(missing)} missing; TEXT is a folder of {', '.join(files.values())} in two languages"
        )
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in texts.items()}
    source = {"vocab": vocab, "sha256": digests}
    if data.exists():
        found = source_of(data)
        if found != source:
            of = "another text or --vocab" if found else "an older version, which does not say of what text"
            raise SystemExit(f"{folder} holds the data of {of}; give another --work")
        return data
    pieces = folder / "pieces"
    pieces.mkdir(parents=True, exist_ok=True)
    train = [texts[f"train.{language}"] for language in languages]
    try:
        processor = segment.learn(train, folder / "spm.model", vocab)
    except ValueError as error:  # names the largest possible value
        raise SystemExit(f"--vocab {vocab}: {error}") from None
    for name, path in texts.items():
        segment.encode(processor, path, pieces / name)
    command = [sys.executable, "-m", "surface_fusion", "preprocess", "--joined-dictionary"]
    new = folder / f".data-bin.{secrets.token_hex(8)}.tmp"
    command += ["-s", languages[0], "-t", languages[1], "--destdir", str(new)]
    command += ["--trainpref", str(pieces / "train"), "--validpref", str(pieces / "valid")]
    command += ["--testpref", f"{pieces / 'test'},{pieces / 'test1'}"]
    new.mkdir()
    try:
        output_of(command, child_environment())
        save_text(new / SOURCE, json.dumps(source, indent=1))
        os.replace(new, data)
    finally:
        shutil.rmtree(new, ignore_errors=True)
    return data


def source_of(data: Path) -> object:
    """What :func:`prepare` made the folder *data* of."""
    kept = data / SOURCE
    return json.loads(kept.read_text(encoding="utf-8")) if kept.exists() else None


def kept_outcome(kept: Path) -> dict[str, Any]:
    """What :func:`train_and_translate` left in the file *kept*; nothing if it is not there.

    Raises:
        SystemExit: it is damaged.
    """
    if not kept.exists():
        return {}
    try:
        outcome: dict[str, Any] = json.loads(kept.read_text(encoding="utf-8"))
        found = outcome.setdefault("machine", UNKNOWN)
        for name in ("asked", "translations"):
            if not isinstance(outcome.setdefault(name, {}), dict):
                raise ValueError(f"its {name!r} is {outcome[name]!r}")
    except (ValueError, AttributeError) as error:
        raise SystemExit(f"{kept} is damaged ({error}); remove it, and the training is done again") from None
    said = isinstance(found, dict) and found.keys() == UNKNOWN.keys()
    if not (said and all(isinstance(name, str) for name in found.values())):
        raise SystemExit(
            f'{kept}: "machine" is {found!r}; give it "hardware" and "torch", or leave it out: unknown'
        )
    return outcome


def differences(here: Mapping[str, Any], there: Mapping[str, Any]) -> str:
    """In what two askings for a training differ: flags with both values."""
    return ", ".join(
        f"--{key.replace('_', '-')} {there.get(key)} (here {value})" if key in FLAGS else f"another {key}"
        for key, value in here.items()
        if there.get(key) != value
    )


def train_and_translate(
    model: Sequence[str],
    seed: int,
    recipe: Recipe,
    texts: Sequence[str],
    data: Path,
    folder: Path,
    *,
    cpu: bool,
    workers: int,
    device: int | None,
    score_only: bool,
) -> dict[str, Any]:
    """Train *model* (flags) and translate *texts* (of :data:`SUBSETS`), beam 4, but for what *folder* holds.

    Args:
        score_only: nothing may be left to do.

    Returns:
        ``translations`` of each text, the number of ``parameters``, and the ``machine`` that trained it.

    Raises:
        SystemExit: a process failed, with the end of its output; or something is left to do.
    """
    kept, checkpoint = folder / OUTCOME, folder / "checkpoint_last.pt"
    asked = {"model": list(model), "seed": seed, "data": source_of(data), **asdict(recipe)}
    outcome = kept_outcome(kept)
    environment = child_environment(device)
    same = outcome.get("asked") == asked
    lacking = [name for name in texts if name not in outcome.get("translations", ())]
    if score_only and not same:
        raise SystemExit(
            f"{folder} does not hold it, by these flags; leave out --score-only, or give those of its "
            f"training: {differences(asked, outcome.get('asked', {}))}"
        )
    if score_only and lacking:
        raise SystemExit(f"{kept} lacks translations of {', '.join(lacking)}; leave out --score-only")
    if not same or (lacking and not checkpoint.exists()):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        flags = [*recipe.flags(data, cpu=cpu, workers=workers), *OURS, *model, "--seed", str(seed)]
        flags += [*ONLY_LAST, "--save-dir", str(folder), "--log-file", str(folder / "train.log")]
        output_of([sys.executable, "-m", "surface_fusion", "train", *flags], environment)
        parameters = checkpoint_facts(str(checkpoint), trust=False)["parameters"]
        outcome = {"asked": asked, "parameters": parameters, "translations": {}}
        outcome["machine"] = machine(cpu, device)
        save_text(kept, json.dumps(outcome))
    for name in texts:
        if name in outcome["translations"]:
            continue
        flags = [str(data), "-s", recipe.source, "-t", recipe.target, "--path", str(checkpoint)]
        flags += ["--gen-subset", SUBSETS[name], "--beam", "4", "--batch-size", "128"]
        flags += ["--max-len-a", "1.2", "--max-len-b", "10", "--remove-bpe", "sentencepiece"]
        flags += [*(("--cpu",) if cpu else ()), *(("--fp16",) if recipe.dtype == "fp16" else ())]
        printed = output_of([sys.executable, "-m", "surface_fusion", "generate", *flags], environment)
        outcome["translations"][name] = parse_generate_output(split_lines(printed)).text
        save_text(kept, json.dumps(outcome, ensure_ascii=False))
    return outcome


def parse(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """The command line of the table *name*: the flags of *parser* and those of all tables of experiments.

    Returns:
        With ``files``, the names of the texts, and ``place``, arguments of :func:`train_and_translate`.
    """
    parser.add_argument("text", type=Path, nargs="?", metavar="TEXT")
    parser.add_argument("--work", type=Path, metavar="DIR", help="data, checkpoints, translations")
    parser.add_argument("--updates", type=positive, metavar="N", help="of each training; default: 2500")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="of a batch; default: 8192")
    parser.add_argument("--vocab", type=positive, metavar="N", help="sentencepiece units; default: 8000")
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="trainings at once, over all GPUs"
    )
    parser.add_argument(
        "--score-only", action="store_true", help="of what DIR holds; needs no GPU, whatever --dtype says"
    )
    add_common_flags(parser, name, contenders=(), dtypes="one")
    args = parser.parse_args()
    settle_common_flags(args, name, trains=not args.score_only)
    if args.score_only and args.work is None:
        parser.error("--score-only scores what --work DIR holds; give it")
    if args.quick != (args.text is None) or (args.text and args.work is None):
        parser.error("give TEXT and --work DIR, or --quick")
    updates, max_tokens, vocab = (3, 800, 300) if args.quick else (2500, 8192, 8000)
    args.updates, args.max_tokens = args.updates or updates, args.max_tokens or max_tokens
    args.vocab = args.vocab or vocab
    args.text, args.files = (SAMPLE, QUICK_FILES) if args.quick else (args.text, FILES)
    args.place = {"cpu": args.cpu, "workers": 0 if args.quick else 2, "score_only": args.score_only}
    return args


def references_of(name: str, language: str, args: argparse.Namespace) -> list[str]:
    """The lines of the text *name* (of :data:`experiment.SUBSETS`) in *language*."""
    path: Path = args.text / f"{args.files[SUBSETS[name]]}.{language}"
    return read_lines(path)
