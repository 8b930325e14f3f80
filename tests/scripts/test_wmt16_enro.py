"""The recipe of the published experiment, on a small archive of the published one's layout."""

import io
import os
import re
import shlex
import subprocess
import sys
import tarfile
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

import pytest
from fairseq.data import Dictionary, data_utils
from sacrebleu.metrics.bleu import BLEU

from tests.helpers.published_commands import FAST, GENERATE, TRAIN, flags

pytestmark = pytest.mark.slow

CLONE = Path(__file__).parents[2]
TEXT = CLONE / "tests/data/enro"
SCRIPTS = CLONE / "scripts/wmt16_enro"
DIRECTIONS = ("en-ro", "ro-en")
MEMBERS = {"train": "train/corpus.bpe", "valid": "dev/dev.bpe", "test": "test/test.bpe"}
PAIRS = {"train": 60, "valid": 20, "test": 20}  # the latter two are the first of the training pairs

# Small enough for a CPU, and bent on learning the training set by heart.
TINY = shlex.split(
    "--encoder-layers 1 --decoder-layers 2 --encoder-embed-dim 64 --decoder-embed-dim 64 "
    "--encoder-ffn-embed-dim 128 --decoder-ffn-embed-dim 128 --encoder-attention-heads 2 "
    "--decoder-attention-heads 2 --dropout 0 --attention-dropout 0 --update-freq 1 --lr 0.003 "
    "--warmup-updates 40 --validate-interval 1000 --save-interval 1000 --num-workers 0"
)


def pieces(line: str) -> str:
    """*line* in tokens of at most four characters, in the manner of BPE: ``Some@@ one will have to pay .``"""
    tokens = re.findall(r"\w+|[^\w\s]", line)
    return " ".join(re.sub(r"(.{4})(?=.)", r"\1@@ ", token) for token in tokens)


def sentences(split: str, lang: str) -> list[str]:
    lines = (TEXT / f"train.{lang}").read_text(encoding="utf-8").splitlines()
    return [pieces(line) for line in lines[: PAIRS[split]]]


def members() -> dict[str, list[str]]:
    return {
        f"wmt16/en-ro/{MEMBERS[split]}.{lang}": sentences(split, lang)
        for split in MEMBERS
        for lang in ("en", "ro")
    }


def write_archive(path: Path, contents: dict[str, list[str]], prefix: str = "") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, lines in contents.items():
            data = "".join(line + "\n" for line in lines).encode()
            info = tarfile.TarInfo(prefix + name)
            info.size = len(data)
            tar.addfile(info, io.BytesIO(data))
    return path


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_archive(tmp_path_factory.mktemp("archive") / "wmt16.tar.gz", members())


Run = Callable[..., "subprocess.CompletedProcess[str]"]


def runner(folder: Path, python: str) -> Run:
    """Runs a script of the recipe in *folder*, with the shell script *python* as the active Python."""
    (folder / "bin").mkdir()
    (folder / "bin/python").write_text(f"#!/bin/sh\n{python}\n")
    (folder / "bin/python").chmod(0o755)
    env = {**os.environ, "PATH": f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}", "OMP_NUM_THREADS": "1"}

    def run(script: str, *args: object, status: int = 0) -> "subprocess.CompletedProcess[str]":
        done = subprocess.run(
            [str(SCRIPTS / script), *map(str, args)],
            cwd=folder,
            env=env,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == status, done.stdout[-3000:] + done.stderr[-3000:]
        return done

    return run


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Run:
    return runner(tmp_path_factory.mktemp("elsewhere"), f'exec {shlex.quote(sys.executable)} "$@"')


@pytest.fixture(scope="module")
def prepared(archive: Path, run: Run, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("experiment") / "out"
    done = run("prepare.sh", archive, out, "--workers", 2)
    assert done.stdout.endswith(f"{out}/data-bin is complete: {PAIRS['train']} training pairs\n")
    return out


def refusal(done: "subprocess.CompletedProcess[str]") -> str:
    """The one line on stderr."""
    assert done.stderr.count("\n") == 1, done.stderr
    return done.stderr.strip()


class TestPrepare:
    def test_every_file_is_binarised_with_one_dictionary(self, prepared: Path) -> None:
        dictionary = Dictionary.load(str(prepared / "data-bin/dict.en.txt"))
        assert dictionary == Dictionary.load(str(prepared / "data-bin/dict.ro.txt"))
        for split in MEMBERS:
            for lang in ("en", "ro"):
                data = data_utils.load_indexed_dataset(
                    str(prepared / f"data-bin/{split}.en-ro.{lang}"), dictionary
                )
                assert [dictionary.string(line) for line in data] == sentences(split, lang)
        assert sorted(path.name for path in prepared.iterdir()) == ["archive.cksum", "data-bin", "wmt16"]

    def test_a_second_time_it_does_nothing(self, prepared: Path, archive: Path, run: Run) -> None:
        before = {path: path.stat().st_mtime_ns for path in prepared.rglob("*")}
        assert "is complete already" in run("prepare.sh", archive, prepared).stdout
        assert {path: path.stat().st_mtime_ns for path in prepared.rglob("*")} == before

    def test_another_archive_is_not_mixed_in(self, prepared: Path, run: Run, tmp_path: Path) -> None:
        other = write_archive(tmp_path / "other.tar.gz", {**members(), "readme": ["other"]})
        line = refusal(run("prepare.sh", other, prepared, status=2))
        assert line.startswith(f"prepare.sh: {prepared} was prepared from another archive")

    @pytest.mark.parametrize("name", list(members()))
    def test_a_missing_member_is_named(self, name: str, run: Run, tmp_path: Path) -> None:
        contents = {**members(), f"{name}.orig": ["not this"], f"other/{name}": ["nor this"]}
        del contents[name]
        archive = write_archive(tmp_path / "wmt16.tar.gz", contents)
        line = refusal(run("prepare.sh", archive, tmp_path / "out", status=2))
        assert line == f"prepare.sh: {archive} lacks {name}"
        assert not (tmp_path / "out").exists()

    def test_unequal_sides_are_refused(self, run: Run, tmp_path: Path) -> None:
        contents = members()
        contents["wmt16/en-ro/dev/dev.bpe.ro"].pop()
        # Names that start with ./ are as good.
        archive = write_archive(tmp_path / "wmt16.tar.gz", contents, prefix="./")
        line = refusal(run("prepare.sh", archive, tmp_path / "out", status=2))
        assert line == f"prepare.sh: {archive}: wmt16/en-ro/dev/dev.bpe has 20 lines in .en but 19 in .ro"
        assert list((tmp_path / "out").iterdir()) == []

    def test_a_missing_or_invalid_archive_is_refused(self, run: Run, tmp_path: Path) -> None:
        assert "no archive given" in refusal(run("prepare.sh", status=2))
        assert refusal(run("prepare.sh", "nowhere.tar.gz", status=2)) == (
            "prepare.sh: archive nowhere.tar.gz does not exist"
        )
        (tmp_path / "text").write_text("no archive\n")
        assert "is not a tar archive" in refusal(
            run("prepare.sh", tmp_path / "text", tmp_path / "out", status=2)
        )


@dataclass
class Recorded:
    """Runs the scripts on a machine of *gpus* GPUs whose Python only writes down its arguments."""

    folder: Path
    gpus: int

    def __post_init__(self) -> None:
        self.out = self.folder / "out"
        for name in ("data-bin/dict.en.txt", "checkpoints/en-ro/checkpoint_best.pt"):
            (self.out / name).parent.mkdir(parents=True)
            (self.out / name).touch()
        self.run = runner(
            self.folder,
            f'case "$*" in *find_spec*) ;; *device_count*) echo {self.gpus} ;; '
            f"*) printf '%s\\n' \"$@\" >>{self.folder}/commands ;; esac",
        )

    def command(self, script: str, *args: object) -> list[str]:
        """The arguments of Python's first command."""
        self.run(script, self.out, *args)
        first, *_ = (self.folder / "commands").read_text().split("-m\nsurface_fusion\n")[1:]
        return first.splitlines()


class TestCommands:
    @pytest.mark.parametrize("gpus", [1, 2, 4, 8])
    def test_training_is_the_published_command_on_any_number_of_gpus(self, gpus: int, tmp_path: Path) -> None:
        machine = Recorded(tmp_path, gpus)
        command = machine.command("train.sh")
        published = [FAST.get(flag, flag) for flag in flags(TRAIN, machine.out / "checkpoints/en-ro")]
        published[published.index("--update-freq") + 1] = str(8 // gpus)
        at = published.index("--fp16") + 1
        published[at:at] = ["--distributed-world-size", str(gpus)]
        data = [str(machine.out / "data-bin"), "--source-lang", "en", "--target-lang", "ro"]
        assert command == ["train", *data, *published]

    def test_fewer_gpus_raise_the_update_frequency(self, tmp_path: Path) -> None:
        command = Recorded(tmp_path, 8).command("train.sh", "--gpus", 2)
        assert command[command.index("--distributed-world-size") + 1] == "2"
        assert command[command.index("--update-freq") + 1] == "4"

    def test_training_without_a_gpu_uses_the_cpu(self, tmp_path: Path) -> None:
        command = Recorded(tmp_path, 0).command("train.sh")
        assert "--fp16" not in command and "--cpu" in command
        assert command[command.index("--update-freq") + 1] == "8"

    @pytest.mark.parametrize(
        ("seen", "args", "line"),
        [
            (3, [], "3 GPUs cannot share 8 batches of 2048 tokens evenly; give --gpus 1, 2, 4 or 8"),
            (8, ["--gpus", "16"], "16 GPUs cannot share 8 batches"),
            (8, ["--gpus", "all"], "all GPUs cannot share 8 batches"),
            (2, ["--gpus", "4"], "--gpus 4: torch sees 2"),
            (1, ["--gpus"], "--gpus needs a value"),
            (1, ["--direction", "en-de"], "--direction en-de: unknown, choose en-ro or ro-en"),
            (1, ["--max-update", "9"], "unknown option --max-update; flags for fairseq go after --"),
            (1, ["another"], "one argument too many: another"),
        ],
    )
    def test_invalid_arguments_of_train_are_refused(
        self, seen: int, args: list[str], line: str, tmp_path: Path
    ) -> None:
        machine = Recorded(tmp_path, seen)
        done = machine.run("train.sh", machine.out, *args, status=2)
        assert refusal(done).startswith(f"train.sh: {line}")
        assert not (tmp_path / "commands").exists()

    def test_direction_baseline_and_further_flags_can_be_given(self, tmp_path: Path) -> None:
        machine = Recorded(tmp_path, 8)
        command = machine.command("train.sh", "--direction", "ro-en", "--vanilla", "--", "--seed", "2")
        assert command[2:6] == ["--source-lang", "ro", "--target-lang", "en"]
        assert command[command.index("--save-dir") + 1] == f"{machine.out}/checkpoints/ro-en-vanilla"
        assert not [arg for arg in command if arg.startswith(("--sf-", "--surfacefusion"))]
        assert command[-4:] == ["--attention-dropout", "0.1", "--seed", "2"]

    def test_evaluation_is_the_published_command(self, tmp_path: Path) -> None:
        machine = Recorded(tmp_path, 1)
        command = machine.command("evaluate.sh")
        data = [str(machine.out / "data-bin"), "--source-lang", "en", "--target-lang", "ro"]
        published = flags(GENERATE, machine.out / "checkpoints/en-ro")
        assert command == ["generate", *data, *published]

    @pytest.mark.parametrize("script", ["train.sh", "evaluate.sh"])
    def test_a_missing_earlier_step_is_named(self, script: str, tmp_path: Path) -> None:
        machine = Recorded(tmp_path, 1)
        done = machine.run(script, tmp_path / "nowhere", status=2)
        assert refusal(done) == (
            f"{script}: {tmp_path}/nowhere/data-bin is missing; "
            f"run prepare.sh ARCHIVE {tmp_path}/nowhere first"
        )
        done = machine.run("evaluate.sh", machine.out, "--direction", "ro-en", status=2)
        assert refusal(done).endswith("ro-en/checkpoint_best.pt is missing; run train.sh first")

    def test_a_missing_environment_is_named(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setenv("SURFACE_FUSION_VENV", str(tmp_path / "no-venv"))
        machine = Recorded(tmp_path, 1)
        for name in ("python", "python3"):
            (tmp_path / "bin" / name).write_text("#!/bin/sh\nexit 1\n")
            (tmp_path / "bin" / name).chmod(0o755)
        line = refusal(machine.run("train.sh", machine.out, status=2))
        assert line.startswith("train.sh: no python with fairseq found; run scripts/setup.sh")


@pytest.fixture(scope="module")
def output(prepared: Path, run: Run) -> dict[str, str]:
    """What evaluate.sh printed for each direction."""

    def train_and_evaluate(direction: str) -> str:
        run("train.sh", prepared, "--direction", direction, "--", *TINY, "--max-update", 120)
        return run("evaluate.sh", prepared, "--direction", direction).stdout

    with ThreadPoolExecutor() as pool:
        return dict(zip(DIRECTIONS, pool.map(train_and_evaluate, DIRECTIONS), strict=True))


class TestChain:
    """Train and translate with a tiny model that learns 60 pairs by heart, the test set among them."""

    @pytest.mark.parametrize("direction", DIRECTIONS)
    def test_the_model_translates_what_it_learned(
        self, direction: str, output: dict[str, str], prepared: Path
    ) -> None:
        src, tgt = direction.split("-")
        lines = (
            (prepared / "checkpoints" / direction / "generate.txt").read_text(encoding="utf-8").splitlines()
        )
        found = {line.partition("\t")[0]: line.split("\t")[-1] for line in lines if re.match("[STH]-", line)}
        whole = [[s.replace("@@ ", "") for s in sentences("test", lang)] for lang in (src, tgt)]
        for i, (source, target) in enumerate(zip(*whole, strict=True)):
            assert found[f"S-{i}"] == source
            assert found[f"T-{i}"] == target
        assert len([name for name in found if name.startswith("H-")]) == PAIRS["test"]

        hypotheses = [found[f"H-{i}"] for i in range(PAIRS["test"])]
        bleu = BLEU(tokenize="none", force=True).corpus_score(hypotheses, [whole[1]]).score
        assert bleu > 90
        printed = output[direction]
        assert float(re.search(r"fairseq-generate: BLEU4 = ([\d.]+)", printed)[1]) == pytest.approx(
            bleu, abs=0.01
        )
        assert float(re.search(r"tokenised BLEU\D*([\d.]+)", printed)[1]) == pytest.approx(bleu, abs=0.01)
        assert ("nearly 35.1" in printed) == (direction == "en-ro")

    def test_training_goes_on_where_it_stopped(
        self, output: dict[str, str], prepared: Path, run: Run
    ) -> None:
        log = run("train.sh", prepared, "--", *TINY, "--max-update", 122).stdout
        assert re.search(
            r"Loaded checkpoint \S*/checkpoints/en-ro/checkpoint_last.pt \(epoch \d+ @ 120 updates\)", log
        )
        assert "num_updates: 122 >= max_update: 122" in log
