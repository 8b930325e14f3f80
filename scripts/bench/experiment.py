"""One translation experiment: segment and binarise raw text, train a model, translate test sets."""

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

from contenders import LAST_CHECKPOINT_ONLY, OURS, PRECISION, SAMPLE, SIZES, child_environment, output_of
from results import add_common_flags, machine, normalise_common_flags, positive

from surface_fusion.analysis.figures import save_text
from surface_fusion.cli.info import checkpoint_facts
from surface_fusion.io.lines import read_lines, split_lines
from surface_fusion.scoring import parse_generate_output

sys.path.insert(0, str(Path(__file__).parents[1] / "demo"))
import segment

SUBSETS = {"valid": "valid", "core": "test", "newstest2016": "test1"}
"""Texts that can be translated -> fairseq's name of the subset."""

FILES = {"train": "core.train", "valid": "core.valid", "test": "core.test", "test1": "newstest2016"}
QUICK_FILES = {"train": "train", "valid": "valid", "test": "test", "test1": "test"}
"""Subset -> name of its file without the language, in TEXT and in the sample."""

SOURCE = "source.json"
"""File in a data folder that describes the text and vocabulary it was built from."""

OUTCOME = "outcome.json"
"""File in a training's folder with the request (``asked``), the translations and the machine."""

UNKNOWN = {"hardware": "unknown", "torch": "unknown"}
"""The machine of an outcome that does not name it."""

FLAGS = ("size", "norm", "dropout", "lr", "updates", "max_tokens", "dtype", "vocab")
"""Entries of a request that are flags of the scripts."""


@dataclass(frozen=True)
class Recipe:
    """The settings that all trainings of a table share."""

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
    """Size of the joint sentencepiece vocabulary."""

    def setting(self) -> dict[str, object]:
        """Return the settings for a row of the table."""
        settings = asdict(self)
        return {"direction": f"{settings.pop('source')}-{settings.pop('target')}", **settings}

    def flags(self, data: Path, *, cpu: bool, workers: int) -> list[str]:
        """Return a training's command line, except for its model, seed and folder."""
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
    work: Path | None, languages: tuple[str, str], required: Iterable[str] | None = None
) -> Iterator[Path]:
    """Yield the folder of a direction in *work*, or a temporary one, locked for this run.

    Args:
        work: value of ``--work``.
        languages: source and target.
        required: trainings whose outcomes must exist; the folder is then read only, and not locked.

    Raises:
        SystemExit: the folder cannot be created, another run uses it, or an outcome is missing.
    """
    if work is not None and required is not None:
        yield existing_folder(work, languages, required)
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
                raise SystemExit(f"another run uses {folder}; wait for it, or give another --work") from None
            yield folder


def existing_folder(work: Path, languages: tuple[str, str], names: Iterable[str]) -> Path:
    """Return the folder of a direction in *work*.

    Raises:
        SystemExit: it does not exist, or lacks the outcome of one of the trainings *names*.
    """
    folder = work / "-".join(languages)
    if not (folder / "data-bin" / SOURCE).is_file():
        raise SystemExit(
            f"--work {work}: {folder} has no data-bin of these scripts; give the --work of a training"
        )
    missing = [name for name in names if not (folder / name / OUTCOME).is_file()]
    if missing:
        raise SystemExit(f"{folder} has no {OUTCOME} of {', '.join(missing)}; leave out --score-only")
    return folder


def prepare(text: Path, folder: Path, languages: tuple[str, str], vocab: int, files: dict[str, str]) -> Path:
    """Segment and binarise *text* in *folder* if that is not done; return the data folder.

    Raises:
        SystemExit: a text is missing, *vocab* is too large, or *folder* was built from another text.
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
        existing = read_source(data)
        if existing != source:
            origin = (
                "another text or --vocab" if existing else "an older version, which did not record the text"
            )
            raise SystemExit(f"{folder} has the data of {origin}; give another --work")
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


def read_source(data: Path) -> object:
    """Return the description that :func:`prepare` wrote to the folder *data*; None if there is none."""
    path = data / SOURCE
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def read_outcome(path: Path) -> dict[str, Any]:
    """Return the outcome that :func:`train_and_translate` wrote to *path*; empty if there is none.

    Raises:
        SystemExit: it is damaged.
    """
    if not path.exists():
        return {}
    try:
        outcome: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        machine = outcome.setdefault("machine", UNKNOWN)
        for name in ("asked", "translations"):
            if not isinstance(outcome.setdefault(name, {}), dict):
                raise ValueError(f"its {name!r} is {outcome[name]!r}")
    except (ValueError, AttributeError) as error:
        raise SystemExit(f"{path} is damaged ({error}); remove it to repeat the training") from None
    has_both = isinstance(machine, dict) and machine.keys() == UNKNOWN.keys()
    if not (has_both and all(isinstance(name, str) for name in machine.values())):
        raise SystemExit(
            f'{path}: "machine" is {machine!r}; give it "hardware" and "torch", or remove it if unknown'
        )
    return outcome


def differences(request: Mapping[str, Any], earlier: Mapping[str, Any]) -> str:
    """Describe how *request* differs from that of an *earlier* training: flags with both values."""
    return ", ".join(
        f"--{key.replace('_', '-')} {earlier.get(key)} (here {value})" if key in FLAGS else f"another {key}"
        for key, value in request.items()
        if earlier.get(key) != value
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
    """Train a model and translate *texts* with beam 4, except for the results that *folder* already has.

    Args:
        model: flags of the model, optimizer and criterion.
        seed: seed of the training.
        recipe: the other settings.
        texts: keys of :data:`SUBSETS`.
        data: data folder.
        folder: folder of the training.
        cpu: whether to use the CPU.
        workers: number of data workers.
        device: index of the GPU; None for all.
        score_only: whether to fail instead of training or translating.

    Returns:
        ``translations`` of each text, the number of ``parameters``, and the ``machine`` that trained it.

    Raises:
        SystemExit: a process failed (the message has the end of its output), or with *score_only* a result is
            missing.
    """
    path, checkpoint = folder / OUTCOME, folder / "checkpoint_last.pt"
    request = {"model": list(model), "seed": seed, "data": read_source(data), **asdict(recipe)}
    outcome = read_outcome(path)
    environment = child_environment(device)
    same = outcome.get("asked") == request
    missing = [name for name in texts if name not in outcome.get("translations", ())]
    if score_only:
        require_complete(folder, request, outcome, missing)
    if not same or (missing and not checkpoint.exists()):
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        flags = [*recipe.flags(data, cpu=cpu, workers=workers), *OURS, *model, "--seed", str(seed)]
        flags += [*LAST_CHECKPOINT_ONLY, "--save-dir", str(folder), "--log-file", str(folder / "train.log")]
        output_of([sys.executable, "-m", "surface_fusion", "train", *flags], environment)
        parameters = checkpoint_facts(str(checkpoint), trust=False)["parameters"]
        trained = {"asked": request, "parameters": parameters, "machine": machine(cpu, device)}
        outcome = {**trained, "translations": {}}
        save_text(path, json.dumps(outcome))
    for name in texts:
        if name not in outcome["translations"]:
            outcome["translations"][name] = translate(name, recipe, data, checkpoint, cpu, environment)
            save_text(path, json.dumps(outcome, ensure_ascii=False))
    return outcome


def require_complete(
    folder: Path, request: dict[str, Any], outcome: dict[str, Any], missing: Sequence[str]
) -> None:
    """Check that *outcome* is that of *request*, with all translations.

    Raises:
        SystemExit: it is not.
    """
    if outcome.get("asked") != request:
        raise SystemExit(
            f"{folder} was trained with other flags; leave out --score-only, or give those of its "
            f"training: {differences(request, outcome.get('asked', {}))}"
        )
    if missing:
        raise SystemExit(
            f"{folder / OUTCOME} lacks translations of {', '.join(missing)}; leave out --score-only"
        )


def translate(
    name: str, recipe: Recipe, data: Path, checkpoint: Path, cpu: bool, environment: dict[str, str]
) -> list[str]:
    """Translate the text *name* with beam 4 in a child process; return the detokenised lines."""
    flags = [str(data), "-s", recipe.source, "-t", recipe.target, "--path", str(checkpoint)]
    flags += ["--gen-subset", SUBSETS[name], "--beam", "4", "--batch-size", "128"]
    flags += ["--max-len-a", "1.2", "--max-len-b", "10", "--remove-bpe", "sentencepiece"]
    flags += [*(("--cpu",) if cpu else ()), *(("--fp16",) if recipe.dtype == "fp16" else ())]
    output = output_of([sys.executable, "-m", "surface_fusion", "generate", *flags], environment)
    return parse_generate_output(split_lines(output)).text


def parse_flags(parser: argparse.ArgumentParser, name: str) -> argparse.Namespace:
    """Parse the command line of the table *name*, after adding the flags that experiments share to *parser*.

    Returns:
        The flags, with ``files`` (:data:`FILES` or :data:`QUICK_FILES`) and ``train_options``, keyword
        arguments of :func:`train_and_translate`.
    """
    parser.add_argument("text", type=Path, nargs="?", metavar="TEXT")
    parser.add_argument(
        "--work", type=Path, metavar="DIR", help="folder for data, checkpoints and translations"
    )
    parser.add_argument("--updates", type=positive, metavar="N", help="updates per training; default: 2500")
    parser.add_argument("--max-tokens", type=positive, metavar="N", help="tokens per batch; default: 8192")
    parser.add_argument("--vocab", type=positive, metavar="N", help="sentencepiece units; default: 8000")
    parser.add_argument(
        "--jobs", type=positive, default=1, metavar="N", help="trainings at once, spread over the GPUs"
    )
    parser.add_argument(
        "--score-only",
        action="store_true",
        help="score the translations in DIR without training; needs no GPU",
    )
    add_common_flags(parser, name, contenders=(), dtypes="one")
    args = parser.parse_args()
    normalise_common_flags(args, name, trains=not args.score_only)
    if args.score_only and args.work is None:
        parser.error("--score-only needs --work DIR, the folder of the translations")
    if args.quick != (args.text is None) or (args.text and args.work is None):
        parser.error("give TEXT and --work DIR, or --quick")
    updates, max_tokens, vocab = (3, 800, 300) if args.quick else (2500, 8192, 8000)
    args.updates, args.max_tokens = args.updates or updates, args.max_tokens or max_tokens
    args.vocab = args.vocab or vocab
    args.text, args.files = (SAMPLE, QUICK_FILES) if args.quick else (args.text, FILES)
    args.train_options = {"cpu": args.cpu, "workers": 0 if args.quick else 2, "score_only": args.score_only}
    return args


def read_references(name: str, language: str, args: argparse.Namespace) -> list[str]:
    """Read the lines of the text *name*, a key of :data:`SUBSETS`, in *language*."""
    path: Path = args.text / f"{args.files[SUBSETS[name]]}.{language}"
    return read_lines(path)
