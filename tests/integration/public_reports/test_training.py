"""Reports on training: what it saves, and how it starts again."""

from pathlib import Path

import pytest
import torch
from fairseq import checkpoint_utils

from surface_fusion.cli.main import main
from tests.helpers.small_training import TRAIN

pytestmark = pytest.mark.slow


def train(data: Path, save_dir: Path, *flags: object) -> int:
    return main([*map(str, ("train", data, *TRAIN, "--save-dir", save_dir, *flags))])


def files(folder: Path) -> dict[str, int]:
    """Names of the checkpoints in *folder*, and when they were written."""
    return {path.name: path.stat().st_mtime_ns for path in folder.iterdir()}


def epoch_length(data: Path, tmp_path: Path) -> int:
    """Number of updates of an epoch."""
    assert train(data, tmp_path / "epoch", "--max-epoch", 1, "--disable-validation") == 0
    state = torch.load(tmp_path / "epoch" / "checkpoint_last.pt")
    return int(state["optimizer_history"][-1]["num_updates"])


@pytest.mark.parametrize(
    ("flag", "limit"), [("--max-update", 3), ("--max-epoch", 1), ("--stop-time-hours", 1e-5)]
)
def test_a_finished_training_does_nothing(
    data: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], flag: str, limit: float
) -> None:
    """It did one more update each time that it was started."""
    assert train(data, tmp_path, flag, limit) == 0
    before = files(tmp_path)
    assert f"reached {flag}" not in capfd.readouterr().out
    assert train(data, tmp_path, flag, limit) == 0
    assert files(tmp_path) == before
    assert f"nothing to do: {tmp_path} has reached {flag} {limit:g}; raise it" in capfd.readouterr().out


def test_a_finished_training_goes_on_with_a_higher_limit(data: Path, tmp_path: Path) -> None:
    for updates in (2, 4):
        assert train(data, tmp_path, "--max-update", updates) == 0
        state = torch.load(tmp_path / "checkpoint_last.pt")
        assert state["optimizer_history"][-1]["num_updates"] == updates


@pytest.mark.parametrize("maximise", [False, True])
def test_the_n_best_checkpoints_are_kept(data: Path, tmp_path: Path, maximise: bool) -> None:
    """The second was left out when its value was worse than the first."""
    flags = ("--keep-best-checkpoints", 2, "--save-interval-updates", 1, "--max-update", 4)
    flags += ("--no-epoch-checkpoints", "--no-last-checkpoints", "--lr", 1e-5)
    flags += ("--maximize-best-checkpoint-metric",) if maximise else ()
    assert train(data, tmp_path, *flags) == 0
    best = [path for path in tmp_path.iterdir() if path.name.startswith("checkpoint.best_loss")]
    updates = {torch.load(path)["optimizer_history"][-1]["num_updates"] for path in best}
    assert len(best) == 2 and updates == ({1, 2} if maximise else {3, 4})


@pytest.mark.parametrize("flags", [(), ("--no-last-checkpoints", "--no-epoch-checkpoints")])
def test_an_update_that_ends_an_epoch_is_saved(data: Path, tmp_path: Path, flags: tuple[object, ...]) -> None:
    """``checkpoint_1_N.pt`` was missing."""
    updates = epoch_length(data, tmp_path)
    flags += ("--save-interval-updates", updates, "--max-epoch", 2, "--keep-interval-updates", 1)
    assert train(data, tmp_path / "save", *flags, "--keep-last-epochs", 1, "--disable-validation") == 0
    expected = {f"checkpoint_2_{2 * updates}.pt"}
    assert set(files(tmp_path / "save")) == expected | (
        set() if "--no-last-checkpoints" in flags else {"checkpoint2.pt", "checkpoint_last.pt"}
    )
    state = torch.load(tmp_path / "save" / f"checkpoint_2_{2 * updates}.pt")
    assert state["extra_state"]["train_iterator"]["epoch"] == 3, "a resume starts the next epoch"


@pytest.mark.parametrize("gone", ["removed", "/dev/zero"])
def test_a_trained_model_needs_no_file_of_embeddings(data: Path, tmp_path: Path, gone: str) -> None:
    """FileNotFoundError when translating; ``/dev/zero`` in a checkpoint of others was read without end."""
    vectors = tmp_path / "E.vec"
    word = (data / "dict.en.txt").read_text(encoding="utf-8").split()[0]
    vectors.write_text(f"1 16\n{word} {' '.join(['0.5'] * 16)}\n")
    flags = ("--encoder-embed-path", vectors, "--decoder-embed-path", vectors, "--max-update", 1)
    assert train(data, tmp_path, *flags) == 0
    vectors.unlink()
    path = tmp_path / "checkpoint_last.pt"
    state = torch.load(path)
    if gone != "removed":
        state["cfg"]["model"].encoder_embed_path = state["cfg"]["model"].decoder_embed_path = gone
        torch.save(state, path)
    (model,), _, task = checkpoint_utils.load_model_ensemble_and_task([str(path)])
    weight = model.encoder.embed_tokens.weight
    assert torch.equal(weight, state["model"]["encoder.embed_tokens.weight"])
    assert weight[task.source_dictionary.index(word)].sub(0.5).abs().max() < 0.1
