"""The demo's two Python scripts; the demo itself is run, shortened, by continuous integration."""

import importlib.util
import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

DEMO = Path(__file__).parents[2] / "scripts" / "demo"

LOG = """\
2026-01-01 00:00:00 | INFO | fairseq.trainer | begin training epoch 1
2026-01-01 00:00:01 | INFO | train_inner | {"epoch": 1, "loss": "9", "nll_loss": "8", "num_updates": "31"}
2026-01-01 00:00:02 | INFO | valid | {"epoch": 1, "valid_nll_loss": "6", "valid_num_updates": "40"}
2026-01-01 00:00:03 | INFO | train_inner | {"epoch": 2, "loss": "5", "nll_loss": "4", "num_updates": "62"}
2026-01-01 00:00:04 | INFO | train | {"epoch": 2, "train_nll_loss": "5", "train_num_updates": "80"}
2026-01-01 00:00:05 | INFO | valid | {"epoch": 2, "valid_nll_loss": "7", "valid_num_updates": "80"}
2026-01-01 00:00:06 | INFO | valid | {"epoch": 2, "valid_nll_loss": "3", "valid_num_updates": "80"}
"""


def script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, DEMO / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_curve_is_read_in_bits_and_a_resumed_training_replaces_its_points(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text(LOG)
    read = script("plot_curve").read
    assert dict(read(log, "train")) == {31: 8, 62: 4}
    assert dict(read(log, "valid")) == {40: 6, 80: 3}


def test_hard_fusion_is_shown_normalised_so_that_the_order_of_curves_is_right(tmp_path: Path) -> None:
    hard, plain = tmp_path / "hard.log", tmp_path / "plain.log"
    stats = {"epoch": 1, "valid_nll_loss": "6.158", "valid_num_updates": "40"}
    hard.write_text(json.dumps({**stats, "valid_normalized_nll_loss": "6.024"}))
    plain.write_text(json.dumps({**stats, "valid_nll_loss": "6.125"}))
    read, shown = script("plot_curve").read, script("progress").progress
    assert read(hard, "valid") == [(40, 6.024)]
    assert read(plain, "valid") == [(40, 6.125)]
    assert shown(hard.read_text(), 100) == " 40 of 100 updates, epoch 1: validation loss 6.02"
    assert shown(plain.read_text(), 100) == " 40 of 100 updates, epoch 1: validation loss 6.12"


@pytest.mark.parametrize("name", ["curve.png", "curve.svg"])
def test_curve_is_drawn(tmp_path: Path, name: str) -> None:
    (tmp_path / "train.log").write_text(LOG)
    script("plot_curve").draw([tmp_path / "train.log"], tmp_path / name)
    assert (tmp_path / name).read_bytes()[:4] in (b"\x89PNG", b"<?xm")
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(["train.log", name])


def test_pieces_join_to_the_text(tmp_path: Path) -> None:
    segment = script("segment")
    texts = [DEMO / "data" / f"valid.{lang}" for lang in ("en", "ro")]
    models = [segment.learn(texts, tmp_path / f"{i}.model", 300) for i in range(2)]
    vocabularies = [[(m.id_to_piece(i), m.get_score(i)) for i in range(300)] for m in models]
    assert vocabularies[0] == vocabularies[1], "no chance involved"
    segment.encode(models[0], texts[1], tmp_path / "valid.ro")
    lines = texts[1].read_text(encoding="utf-8").splitlines()
    pieces = (tmp_path / "valid.ro").read_text(encoding="utf-8").splitlines()
    assert [line.replace(" ", "").replace("▁", " ").strip() for line in pieces] == lines
    assert max(len(line.split()) for line in pieces) > 5


def test_a_piece_of_each_line_whatever_is_in_it(tmp_path: Path) -> None:
    """Both sides of a corpus stay paired: only a line feed ends a line."""
    segment = script("segment")
    data = DEMO / "data"
    model = segment.learn([data / "valid.en"], tmp_path / "spm.model", 300)
    no_ends = ("\r", "\v", "\f", "\x1c", "\x1d", "\x1e", "\x85", "\u2028", "\u2029")
    lines = [f"Tom {character} is here {i}." for i, character in enumerate(no_ends)]
    (tmp_path / "text").write_bytes("".join(line + "\r\n" for line in ["", *lines]).encode())
    segment.encode(model, tmp_path / "text", tmp_path / "pieces")
    first, *pieces, last = (tmp_path / "pieces").read_bytes().decode().split("\n")
    assert (first, last) == ("", "") and len(pieces) == len(lines)
    whole = ["".join(line.split()).replace("▁", " ").split() for line in pieces]
    assert [words[-1] for words in whole] == [f"{i}." for i in range(len(lines))]


def test_a_vocabulary_that_is_too_large_is_one_line(tmp_path: Path) -> None:
    command = [sys.executable, DEMO / "segment.py", DEMO / "data", tmp_path, "--vocab-size", "32000"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(
        "segment.py: --vocab-size 32000: Vocabulary size too high (32000). Please set it to a value <= 9317"
    )
    assert "Traceback" not in done.stderr


def test_names_of_folders_are_not_read_as_markup(tmp_path: Path) -> None:
    """Nor is a curve left out of the legend whose folder begins with an underscore."""
    logs = [tmp_path / name / "train.log" for name in ("_a", "$b$", "$\\frac$")]
    for log in logs:
        log.parent.mkdir()
        log.write_text(LOG)
    script("plot_curve").draw(logs, tmp_path / "curve.svg")
    drawn = (tmp_path / "curve.svg").read_text(encoding="utf-8")
    for log in logs:
        assert f"<!-- {log.parent.name}: training -->" in drawn


def test_a_log_without_losses_is_refused(tmp_path: Path) -> None:
    (tmp_path / "train.log").write_text("nothing of the kind\n")
    with pytest.raises(SystemExit, match=r"train\.log has no training losses"):
        script("plot_curve").draw([tmp_path / "train.log"], tmp_path / "curve.png")
    assert not (tmp_path / "curve.png").exists()


def test_a_line_that_was_cut_is_left_out(tmp_path: Path) -> None:
    """A killed training cuts its last line; the next one appends to it."""
    log, line = tmp_path / "train.log", '{"epoch": 1, "nll_loss": "8", "num_updates": "31"}'
    log.write_text(f"{line[:30]}\n{line[:20]}12:00 | INFO | x | {line}\n{line[:-1]}")
    assert script("plot_curve").read(log, "train") == [(31, 8)]
    assert [bool(script("progress").progress(text, 100)) for text in (line[:30], line)] == [False, True]


def test_a_log_of_hydra_is_read(tmp_path: Path) -> None:
    log = tmp_path / "train.log"
    log.write_text("\n".join(line.split(" | ")[-1] for line in LOG.splitlines()))
    assert [update for update, _ in script("plot_curve").read(log, "train")] == [31, 62]
    assert [update for update, _ in script("plot_curve").read(log, "valid")] == [40, 80]


def test_progress_is_short_and_in_bits() -> None:
    shown = script("progress").progress
    said = [line for line in (shown(line, 100) for line in LOG.splitlines()) if line is not None]
    assert said[0] == " 31 of 100 updates, epoch 1: training loss 8.00"
    assert said[1] == " 40 of 100 updates, epoch 1: validation loss 6.00"
    assert len(said) == 5, "averages of an epoch are left out"
    line = json.dumps({"epoch": 1, "nll_loss": "1", "num_updates": "40", "ups": "2"})
    fast, slow = line, line.replace('"2"', '"0.1"')
    assert shown(fast, 100).endswith(", 30 s left") and shown(slow, 100).endswith(", 10 min left")
    assert shown("12:00 | WARNING | x | look out\n", 100) == "12:00 | WARNING | x | look out"


def test_a_training_interrupted_in_its_first_epoch_goes_on() -> None:
    """An epoch has more updates than thousands of words in the text: 1,000 tokens are a batch."""
    flags = (DEMO.parent / "demo.sh").read_text(encoding="utf-8").split()
    words = (DEMO / "data" / "train.ro").read_text(encoding="utf-8").split()
    assert 0 < int(flags[flags.index("--save-interval-updates") + 1]) < len(words) / 1000
    assert flags[flags.index("--keep-interval-updates") + 1] == "1"


def test_progress_leaves_an_interruption_to_the_training() -> None:
    """Which says so in a line, and whose last lines are still to be shown."""
    command = [sys.executable, str(DEMO / "progress.py"), "--updates", "100"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdin is not None and process.stdout is not None
        process.stdin.write("12:00 | WARNING | x | first\n")
        process.stdin.flush()
        assert process.stdout.readline().endswith("first\n")
        process.send_signal(signal.SIGINT)
        out, err = process.communicate("12:00 | WARNING | x | last\n", timeout=30)
    assert (process.returncode, out, err) == (0, "12:00 | WARNING | x | last\n", "")


STAND_IN = """\
#!/usr/bin/env bash
# surface-fusion, as far as demo.sh needs it: each verb writes its files and talks.
while (($#)); do
    case $1 in
        preprocess | train | generate | score) verb=$1 ;;
        --destdir | --save-dir) mkdir -p "$2" ;;
        --results-path) results=$2 ;;
    esac
    shift
done
echo "$verb: chatter of /some/place" >&2
case $verb in
    train) cat "$LOG" ;;
    generate)
        for i in $(seq 0 499); do printf 'H-%s\t-1\tSalut %s\n' "$i" "$i"; done >"$results/generate-test.txt"
        ;;
    score) echo "sacreBLEU 1.00" ;;
esac
"""


@pytest.mark.slow
def test_the_demo_shows_relative_paths_and_keeps_logs_in_files(tmp_path: Path) -> None:
    """In a path with a space, from another folder, twice; fairseq's part is played by a few lines."""
    clone, venv = tmp_path / "a clone", tmp_path / "venv" / "bin"
    shutil.copytree(DEMO.parent, clone / "scripts", ignore=shutil.ignore_patterns("bench", "__pycache__"))
    venv.mkdir(parents=True)
    for path, text in (
        (clone / "scripts" / "setup.sh", f"#!/usr/bin/env bash\necho '{venv.parent}'\n"),
        (venv / "python", f'#!/usr/bin/env bash\nexec "{sys.executable}" "$@"\n'),
        (venv / "surface-fusion", STAND_IN),
    ):
        path.write_text(text)
        path.chmod(0o755)
    (tmp_path / "log").write_text(LOG)
    command = ["bash", clone / "scripts" / "demo.sh", "--quick"]
    environment = {**os.environ, "LOG": str(tmp_path / "log")}
    said = []
    for folder in (tmp_path, clone):
        done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        said.append(done.stdout)
    assert f"Paths below are relative to {clone}\n" in said[0]
    assert str(clone) not in said[1] and "chatter" not in said[0]
    assert "31 of 20 updates, epoch 1: training loss 8.00\n" in said[0] and "train_inner" not in said[0]
    assert "Cats' eyes are very sensitive to light.\n    Salut 0\n" in said[0]
    assert "picture:      runs/demo-quick/learning_curve.png\n" in said[0]
    assert "done already" not in said[0] and "done already, log: runs/demo-quick/train.log" in said[1]
    run = clone / "runs" / "demo-quick"
    assert (run / "train.log").read_text() == LOG
    assert all("chatter" in (run / f"{verb}.log").read_text() for verb in ("generate", "preprocess"))


def test_a_training_that_was_begun_with_other_flags_is_not_gone_on_with(tmp_path: Path) -> None:
    script, run = tmp_path / "scripts" / "demo.sh", tmp_path / "runs" / "demo-quick"
    script.parent.mkdir()
    shutil.copy(Path(__file__).parents[2] / "scripts" / "demo.sh", script)
    run.mkdir(parents=True)
    (run / "flags").write_text("--cpu\n")
    done = subprocess.run(["bash", script, "--quick", "--seed", "2"], capture_output=True, text=True)
    assert done.returncode == 2
    assert f"{run} was started with the flags '--cpu', not '--seed 2'; delete it" in done.stderr


def test_help_is_the_demos_and_nothing_is_begun() -> None:
    runs = DEMO.parents[1] / "runs" / "demo"
    before = sorted(runs.glob("*")) if runs.exists() else None
    command = [str(DEMO.parent / "demo.sh"), "--help"]
    said = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert said.startswith("Sets everything up") and "--quick" in said and "set -euo" not in said
    assert (sorted(runs.glob("*")) if runs.exists() else None) == before
