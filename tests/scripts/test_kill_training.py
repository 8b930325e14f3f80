"""scripts/reliability: a few kills; and what it compares."""

import csv
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parents[2] / "scripts" / "reliability" / "kill_training.py"
sys.path.insert(0, str(SCRIPT.parent))

import kill_training  # noqa: E402


@pytest.mark.slow
def test_trainings_that_are_killed_end_as_the_one_left_alone(tmp_path: Path) -> None:
    out = tmp_path / "kills.csv"
    limits = ("--kills", "5", "--saving", "1", "--commands", "0")
    command = [sys.executable, SCRIPT, *limits, "-o", out, "--work", tmp_path]
    done = subprocess.run([*map(str, command)], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    with open(out, encoding="utf-8", newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["kill"] for row in rows] == [str(i) for i in range(1, len(rows) + 1)] and len(rows) >= 5
    assert any(row["writing"].startswith("checkpoint") for row in rows)
    assert all(row["next_start"] for row in rows)
    summary = out.with_suffix(".txt").read_text(encoding="utf-8")
    assert f"{len(rows)} kills, " in summary
    assert sorted(path.name for path in tmp_path.iterdir()) == ["kills.csv", "kills.txt"]


def test_a_difference_is_named() -> None:
    one = {"model": {"w": torch.ones(2), "b": [1, {"x": torch.zeros(1)}]}}
    assert kill_training.first_difference(one, one, "last") is None
    for other in (torch.ones(2, dtype=torch.float64), torch.ones(3), torch.tensor([1.0, 1.0 + 2**-23])):
        changed = {"model": {**one["model"], "w": other}}
        assert kill_training.first_difference(one, changed, "last") == "last model w"
    assert kill_training.first_difference({"b": 1}, {"b": 1.0}, "last") == "last b"


@pytest.mark.parametrize(
    ("log", "had_checkpoint", "words"),
    [
        ("Loaded checkpoint a/checkpoint_last.pt (epoch 2 @ 9 updates)", True, "checkpoint_last.pt, epoch 2"),
        ("No existing checkpoint found a", False, "from the beginning"),
        ("", True, "killed before it said so"),
    ],
)
def test_the_start_of_a_resumed_training_is_found_in_its_log(
    log: str, had_checkpoint: bool, words: str
) -> None:
    assert words in kill_training.resumed_from(log, had_checkpoint)


@pytest.mark.parametrize("log", ["No existing checkpoint found a", "checkpoint a is damaged: its table"])
def test_a_start_that_lost_progress_fails(log: str) -> None:
    with pytest.raises(kill_training.Failure):
        kill_training.resumed_from(log, True)
