"""``surface-fusion average``: which checkpoints, what is said, what is refused."""

import pytest
import torch

from tests.helpers.full_disk import files_of_at_most, names


def model(path):
    return torch.load(path, weights_only=True)["model"]


@pytest.fixture
def mean(tmp_path):
    return tmp_path / "mean.pt"


@pytest.mark.parametrize("order", ["named", "last", "output first"])
def test_named_files_and_the_last_of_a_folder_are_averaged(command, save_dir, mean, order):
    files = [save_dir / f"checkpoint{i}.pt" for i in (1, 2)]
    if order == "named":
        result = command("average", *files, "-o", mean)
    elif order == "last":
        result = command("average", "--last", 2, save_dir, "-o", mean)
    else:
        result = command("average", files[0], "--output", mean, files[1])
    assert (result.status, result.err) == (0, "")
    assert result.out.startswith(f"{mean}: the mean of 2 checkpoints, {files[0]}, {files[1]} (0.")
    assert result.out.count("\n") == 1
    name = "decoder.sf_attn.q_proj.weight"
    expected = (model(files[0])[name].double() + model(files[1])[name].double()) / 2
    assert model(mean)[name].equal(expected.float())


def test_last_updates_selects_checkpoints_by_update(command, save_dir, tmp_path, mean):
    for update in (5, 10, 15):
        (tmp_path / f"checkpoint_1_{update}.pt").symlink_to(save_dir / "checkpoint1.pt")
    said = command("average", "--last-updates", 2, tmp_path, "-o", mean).out
    assert "checkpoint_1_5.pt" not in said
    assert said.index("checkpoint_1_10.pt") < said.index("checkpoint_1_15.pt")


def test_nothing_is_left_beside_the_result(command, save_dir, tmp_path, mean):
    command("average", "--last", 2, save_dir, "-o", mean)
    assert [path.name for path in tmp_path.iterdir()] == ["mean.pt"]


@pytest.mark.parametrize(
    "argv, words",
    [
        (("-o", "mean.pt"), "give checkpoints, or --last N DIR, or --last-updates N DIR"),
        (("a.pt", "--last", 2, ".", "-o", "mean.pt"), "give checkpoints, or --last N DIR"),
        (("a.pt",), "the following arguments are required: -o/--output"),
        (("--last", "two", ".", "-o", "mean.pt"), "two is not a number of checkpoints"),
        (("--last", 2, "nowhere", "-o", "mean.pt"), "checkpoint folder nowhere does not exist"),
        (("--last", 2, ".", "-o", "mean.pt"), "has 0 files named checkpointEPOCH.pt, not 2"),
        (("a.pt", "mean.pt", "-o", "./mean.pt"), "./mean.pt is one of the checkpoints to average"),
        (("a.pt", "-o", "mean.pt"), "checkpoint a.pt does not exist"),
    ],
)
def test_bad_input_is_one_line(command, argv, words):
    result = command("average", *argv)
    assert (result.status, result.out) == (2, "")
    assert result.err.startswith("surface-fusion average: error: ") and words in result.err
    assert result.err.count("\n") == 1


def test_another_model_is_refused_by_parameter_and_file(command, checkpoint, tmp_path, mean):
    state = torch.load(checkpoint, weights_only=True)
    state["model"]["decoder.fc1.bias"] = torch.zeros(7)
    torch.save(state, tmp_path / "other.pt")
    result = command("average", checkpoint, tmp_path / "other.pt", "-o", mean)
    assert result.status == 2 and not mean.exists()
    assert "decoder.fc1.bias" in result.err and "other.pt" in result.err and result.err.count("\n") == 1


def test_a_folder_is_not_written_over(command, checkpoint, tmp_path):
    result = command("average", checkpoint, "-o", tmp_path)
    assert result.status == 2 and "is not a regular file and cannot be overwritten" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_failed_write_leaves_nothing(command, checkpoint, tmp_path, monkeypatch):
    def full(state, file):
        file.write(b"half")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(torch, "save", full)
    result = command("average", checkpoint, "-o", tmp_path / "mean.pt")
    assert result.status == 2 and "mean.pt: No space left on device; free space" in result.err
    assert list(tmp_path.iterdir()) == []


def test_a_limit_on_the_size_of_files_leaves_the_old_average(command, checkpoint, tmp_path, mean):
    mean.write_text("old")
    with files_of_at_most(20_000):
        result = command("average", checkpoint, "-o", mean)
    assert result.status == 2 and result.err == (
        f"surface-fusion average: error: cannot write {mean}: File too large; raise the limit on the size of "
        "files (ulimit -f)\n"
    )
    assert mean.read_text() == "old" and names(tmp_path) == ["mean.pt"]


def test_an_input_may_have_any_name(command, checkpoint, tmp_path):
    """0.1.0 wrote to OUT.new, and removed it."""
    source = tmp_path / "m.pt.new"
    source.write_bytes(checkpoint.read_bytes())
    assert command("average", source, checkpoint, "-o", tmp_path / "m.pt").status == 0
    assert source.read_bytes() == checkpoint.read_bytes()
    assert names(tmp_path) == ["m.pt", "m.pt.new"]


def test_a_link_beside_the_output_is_not_followed(command, checkpoint, tmp_path):
    victim, link = tmp_path / "victim", tmp_path / "y.pt.new"
    victim.write_text("victim")
    link.symlink_to(victim)
    assert command("average", checkpoint, "-o", tmp_path / "y.pt").status == 0
    assert victim.read_text() == "victim" and link.is_symlink()
    assert model(tmp_path / "y.pt").keys() == model(checkpoint).keys()
