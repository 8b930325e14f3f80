"""Damaged checkpoints and those that are not finite are named; a training resumes from an intact one.

Also tests ``compat/newest_checkpoint.py``.
"""

import json
import logging
import random
import shutil
import time
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils

from surface_fusion import SurfaceFusionError
from surface_fusion.cli.main import main
from surface_fusion.compat.checkpoint_integrity import check_records, not_finite
from surface_fusion.compat.newest_checkpoint import CHECKPOINT_NAME
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel
from tests.helpers.small_training import TRAIN

QUERY = "decoder.sf_attn.q_proj.weight"
load = checkpoint_utils.load_checkpoint_to_cpu


@pytest.fixture(autouse=True)
def contained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def trained(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with checkpoints of 2, 4 and 6 updates, the last one twice."""
    folder = tmp_path_factory.mktemp("checkpoints")
    assert train(data, folder, "--max-update", 6) == 0
    return folder


def train(data: Path, save_dir: Path, *flags: object) -> int:
    saves = ("--save-interval-updates", 2, "--disable-validation", "--save-dir", save_dir)
    return main([*map(str, ("train", data, *TRAIN, *saves, *flags))])


def changed(path: Path, out: Path, change: Callable[[Any], None]) -> Path:
    """A checkpoint with other values, as if they had been saved so."""
    state = torch.load(path)
    change(state)
    torch.save(state, out)
    return out


def record_of(path: Path, wanted: torch.Tensor) -> tuple[int, int]:
    """Where in the file *path* the memory of a tensor like *wanted* begins, and its size."""
    with zipfile.ZipFile(path) as archive:
        for record in archive.infolist():
            content = archive.read(record)
            if content == wanted.contiguous().view(torch.uint8).numpy().tobytes():
                return path.read_bytes().index(content), len(content)
    raise AssertionError


def flip(path: Path, place: int, bit: int = 0) -> None:
    """Change one bit."""
    content = bytearray(path.read_bytes())
    content[place] ^= 1 << bit
    path.write_bytes(content)


@pytest.fixture
def flipped(trained: Path, tmp_path: Path) -> Path:
    """A checkpoint with one bit of a parameter flipped."""
    path = tmp_path / "flipped.pt"
    shutil.copy(trained / "checkpoint_last.pt", path)
    start, size = record_of(path, torch.load(path)["model"][QUERY])
    flip(path, start + size // 2, 4)
    return path


@pytest.fixture
def with_nan(trained: Path, tmp_path: Path) -> Path:
    """A checkpoint with one NaN in a parameter."""

    def change(state: Any) -> None:
        state["model"][QUERY][0, 3] = float("nan")

    return changed(trained / "checkpoint_last.pt", tmp_path / "nan.pt", change)


# -- damage ---------------------------------------------------------------------------------------


def same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return one.equal(other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return all(same(a, b) for a, b in zip(one, other, strict=True))
    return bool(one == other)


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_is_refused_or_changes_nothing(trained: Path, tmp_path: Path, seed: int) -> None:
    """Wherever it is; where a zip has padding, it changes nothing."""
    whole, path = trained / "checkpoint_last.pt", tmp_path / "flipped.pt"
    expected = load(str(whole))
    parts = ("model", "last_optimizer_state", "optimizer_history")
    rng, refused = random.Random(seed), 0
    for _ in range(40):
        shutil.copy(whole, path)
        flip(path, rng.randrange(path.stat().st_size), rng.randrange(8))
        try:
            state = load(str(path))
        except SurfaceFusionError as error:
            assert str(path) in str(error) and "\n" not in str(error)
            refused += 1
        else:
            assert all(same(state[part], expected[part]) for part in parts)
    assert refused > 30


def test_the_damaged_parameter_is_named(flipped: Path) -> None:
    with pytest.raises(
        SurfaceFusionError,
        match=rf"flipped\.pt is damaged: checksum mismatch in parameter {QUERY}; give another checkpoint",
    ):
        load(str(flipped))


def test_two_of_the_parameters_in_a_damaged_storage_are_named(tmp_path: Path) -> None:
    """flat_adam's on a CPU: what was saved cannot tell which of them it is."""
    flat = torch.arange(100.0)
    path = tmp_path / "flat.pt"
    torch.save({"model": {f"p{i}": flat[10 * i : 10 * i + 10] for i in range(10)}}, path)
    start, _ = record_of(path, flat)
    flip(path, start + 17)
    with pytest.raises(
        SurfaceFusionError, match=r"parameter p0, parameter p1, 8 more tensors in the same storage;"
    ):
        check_records(str(path))


@pytest.mark.parametrize("keep", [0, 1, 100, 200_000, -1])
def test_a_truncated_file_is_named(trained: Path, tmp_path: Path, keep: int) -> None:
    path = tmp_path / "half.pt"
    path.write_bytes((trained / "checkpoint_last.pt").read_bytes()[:keep])
    with pytest.raises(SurfaceFusionError, match=r"half\.pt is (truncated|damaged)"):
        load(str(path))


@pytest.mark.parametrize("kind", ["no checksums", "legacy"])
def test_files_without_checksums_load(trained: Path, tmp_path: Path, kind: str) -> None:
    state, path = torch.load(trained / "checkpoint_last.pt"), tmp_path / "old.pt"
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save(state, path, _use_new_zipfile_serialization=kind != "legacy")
    finally:
        torch.serialization.set_crc32_options(before)
    assert not check_records(str(path))
    assert same(load(str(path))["model"], state["model"])


@pytest.mark.slow
def test_checking_a_large_checkpoint_takes_at_most_1500_ms_of_cpu_time(tmp_path: Path) -> None:
    """60 million parameters; measured: 0.1 s for the records, 0.04 s for the values."""
    path = tmp_path / "big.pt"
    torch.save({"model": {str(i): torch.rand(3_000_000) for i in range(20)}}, path)
    state = torch.load(path, mmap=True)
    start = time.process_time()
    assert check_records(str(path))
    assert not_finite(state) is None
    assert time.process_time() - start < 1.5


# -- in every verb --------------------------------------------------------------------------------


def verbs(path: Path, data: Path) -> dict[str, tuple[object, ...]]:
    return {
        "generate": (data, "--path", path, "--cpu", "--num-workers", 0),
        "validate": (data, "--path", path, "--cpu", "--max-tokens", 400),
        "interactive": (data, "--path", path, "--cpu"),
        "average": (path, "-o", "mean.pt"),
        "analyse": ("branches", path, data, "--cpu", "-o", "out"),
        "train": (data, *TRAIN, "--restore-file", path, "--save-dir", "new", "--max-update", 8),
    }


VERBS = tuple(verbs(Path(), Path()))


@pytest.mark.parametrize("verb", VERBS)
def test_a_damaged_file_is_reported_in_one_line(
    data: Path, flipped: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    """``train --restore-file`` takes no other file instead."""
    whole = tmp_path / "new" / "checkpoint1.pt"
    whole.parent.mkdir()
    shutil.copy(flipped, whole)
    assert main([verb, *map(str, verbs(flipped, data)[verb])]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if " | " not in line]
    assert lines == [
        f"surface-fusion {verb}: error: checkpoint {flipped} is damaged: checksum mismatch in parameter "
        f"{QUERY}; give another checkpoint, or copy the file again"
    ]


@pytest.mark.parametrize("verb", VERBS)
def test_a_non_finite_parameter_is_reported_in_one_line(
    data: Path, with_nan: Path, capsys: pytest.CaptureFixture[str], verb: str
) -> None:
    assert main([verb, *map(str, verbs(with_nan, data)[verb])]) == 2
    lines = [line for line in capsys.readouterr().err.splitlines() if " | " not in line]
    assert lines == [
        f"surface-fusion {verb}: error: checkpoint {with_nan}: parameter {QUERY} is not finite (nan at "
        "[0, 3], 1 of 256 values); use an older checkpoint"
    ]


def test_the_hub_names_a_non_finite_parameter(data: Path, with_nan: Path) -> None:
    with pytest.raises(SurfaceFusionError, match=f"parameter {QUERY} is not finite"):
        SurfaceFusionModel.from_pretrained(str(with_nan.parent), with_nan.name, str(data))


def test_info_reports_a_non_finite_parameter(
    trained: Path, with_nan: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for path, expected in (
        (with_nan, f"parameter {QUERY} is not finite (nan at [0, 3], 1 of 256 values)"),
        (trained / "checkpoint_last.pt", None),
    ):
        assert main(["info", str(path), "--json"]) == 0
        facts = json.loads(capsys.readouterr().out)
        assert facts["not_finite"] == expected and facts["updates"] == 6


# -- what is not finite ---------------------------------------------------------------------------


def test_a_non_finite_buffer_is_named() -> None:
    state = {"model": {"a": torch.ones(3), "table": torch.tensor([[1.0, 2.0], [float("-inf"), 0.0]])}}
    assert not_finite(state) == "parameter table is not finite (-inf at [1, 0], 1 of 4 values)"
    assert not_finite({"model": {"big": torch.full((9,), 60_000.0, dtype=torch.float16)}}) is None


def test_a_mask_may_hold_infinity() -> None:
    assert not_finite({"model": {"decoder.attn_mask": torch.tensor([0.0, float("-inf")])}}) is None


@pytest.mark.parametrize("module", ["encoder.embed_positions", "decoder.adaptive_softmax"])
def test_uninitialised_buffers_of_fairseq_are_not_checked(module: str) -> None:
    """``_float_tensor`` is ``torch.FloatTensor(1)``: what was in that memory."""
    assert not_finite({"model": {f"{module}._float_tensor": torch.tensor([float("nan")])}}) is None


@pytest.mark.parametrize("value", [0.0, float("nan")])
def test_an_expanded_tensor_is_read_once(value: float) -> None:
    found = not_finite({"model": {"w": torch.full((1,), value).expand(2**20, 2**21)}})
    assert found == (None if value == 0 else "parameter w is not finite (nan at [0], 1 of 1 values)")


def test_float8_tensors_are_checked() -> None:
    tensor = torch.tensor([1.0, 2.0]).to(torch.float8_e5m2)
    assert not_finite({"model": {"w": tensor}}) is None
    tensor = torch.tensor([1.0, float("nan")]).to(torch.float8_e5m2)
    assert not_finite({"model": {"w": tensor}}) == "parameter w is not finite (nan at [1], 1 of 2 values)"


@pytest.mark.parametrize("tensor", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_sparse_quantised_and_meta_tensors_are_not_checked(tensor: torch.Tensor) -> None:
    assert not_finite({"model": {"w": tensor}}) is None


def test_the_moving_average_is_checked() -> None:
    state = {"model": {}, "extra_state": {"ema": {"w": torch.tensor(float("inf"))}}}
    assert not_finite(state) == "EMA parameter w is not finite (inf at [], 1 of 1 values)"


@pytest.mark.slow
def test_a_non_finite_optimizer_state_is_named_on_resume(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def change(state: Any) -> None:
        state["last_optimizer_state"]["state"][2]["exp_avg"].view(-1)[5] = float("inf")

    path = changed(trained / "checkpoint_last.pt", tmp_path / "inf.pt", change)
    argv = (data, tmp_path / "new", "--restore-file", path, "--max-update", 8)
    assert train(*argv) == 2
    line = capsys.readouterr().err
    assert f"checkpoint {path}: optimizer state state.2.exp_avg is not finite (inf at " in line
    assert line.endswith("add --reset-optimizer\n") and line.count("\n") == 1
    assert train(*argv, "--reset-optimizer") == 0
    assert main(["generate", *map(str, verbs(path, data)["generate"])]) == 0


# -- a training goes on ---------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    if how == "truncated":
        path.write_bytes(path.read_bytes()[:196_608])
    elif how == "empty":
        path.write_bytes(b"")
    else:
        start, _ = record_of(path, torch.load(path)["model"][QUERY])
        flip(path, start)


@pytest.mark.slow
@pytest.mark.parametrize("how", ["truncated", "flipped", "empty"])
def test_a_resume_skips_a_damaged_last_checkpoint(
    data: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture, how: str
) -> None:
    """And the training ends as if nothing had been."""
    folder, whole = tmp_path / "a", tmp_path / "b"
    for place in (folder, whole):
        shutil.copytree(trained, place)
    last = folder / "checkpoint_last.pt"
    damage(last, how)
    damage(folder / "checkpoint_1_6.pt", "truncated")
    for name in ("checkpoint_1_4.pt", "checkpoint_1_2.pt"):  # the newest by what is in it, not by the clock
        (folder / name).touch()
    caplog.set_level(logging.INFO)
    assert train(data, folder, "--max-update", 8) == 0
    said = [m for m in caplog.messages if "resuming from" in m]
    assert len(said) == 1 and str(last) in said[0]
    assert f"resuming from {folder}/checkpoint_1_4.pt (4 updates), the newest intact one" in said[0]
    loaded = [m for m in caplog.messages if m.startswith("Loaded checkpoint")]
    assert loaded == [f"Loaded checkpoint {folder}/checkpoint_1_4.pt (epoch 1 @ 4 updates)"]
    assert train(data, whole, "--max-update", 8) == 0
    states = [load(str(place / "checkpoint_last.pt")) for place in (folder, whole)]
    assert same(states[0]["model"], states[1]["model"])
    assert same(states[0]["last_optimizer_state"], states[1]["last_optimizer_state"])
    assert states[0]["optimizer_history"][-1]["num_updates"] == 8


@pytest.mark.slow
def test_a_resume_skips_checkpoints_that_no_training_wrote(
    data: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The script average_checkpoints.py of fairseq keeps the rest of a training's last checkpoint."""
    folder = tmp_path / "a"
    shutil.copytree(trained, folder)
    damage(folder / "checkpoint_last.pt", "truncated")
    mean = torch.load(folder / "checkpoint_1_6.pt")
    for value in mean["model"].values():
        value.zero_()
    torch.save(mean, folder / "checkpoint_avg.pt")
    caplog.set_level(logging.INFO)
    assert train(data, folder, "--max-update", 8) == 0
    assert f"resuming from {folder}/checkpoint_1_6.pt (6 updates)" in caplog.text


@pytest.mark.parametrize(
    ("name", "resumed"),
    [
        *((name, True) for name in ("checkpoint3.pt", "checkpoint_3_40.pt", "checkpoint_best.pt")),
        *((name, True) for name in ("checkpoint_last.pt", "checkpoint.best_loss_-9.3101.pt")),
        *((name, False) for name in ("checkpoint_avg.pt", "checkpoint_mean.pt", "checkpoint_last-shard0.pt")),
    ],
)
def test_file_names_that_a_training_writes(name: str, resumed: bool) -> None:
    assert bool(CHECKPOINT_NAME.fullmatch(name)) == resumed


@pytest.mark.slow
def test_a_new_training_in_a_folder_of_checkpoints_logs_a_warning(
    data: Path, trained: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(trained, folder)
    (folder / "checkpoint_last.pt").unlink()
    caplog.set_level(logging.INFO)
    assert train(data, folder, "--max-update", 2) == 0
    said = [m for m in caplog.messages if "has no checkpoint_last.pt" in m]
    assert len(said) == 1 and f"to resume, add --restore-file {folder}/checkpoint" in said[0]
    caplog.clear()
    assert train(data, tmp_path / "new", "--max-update", 2) == 0
    assert "has no checkpoint_last.pt" not in caplog.text


@pytest.mark.slow
def test_a_resume_without_an_intact_checkpoint_is_refused(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """An average beside it is no training."""
    folder = tmp_path / "a"
    folder.mkdir()
    average = ("average", trained / "checkpoint_last.pt", "-o", folder / "checkpoint_mean.pt")
    assert main([*map(str, average)]) == 0
    (folder / "checkpoint_last.pt").write_bytes(b"PK\3\4")
    assert train(data, folder, "--max-update", 8) == 2
    line = capsys.readouterr().err
    assert (
        f"has no intact checkpoint to resume from; remove {folder}/checkpoint_last.pt to start from scratch"
        in line
    )
    assert line.count("\n") == 1


@pytest.mark.slow
def test_a_resume_does_not_skip_a_non_finite_last_checkpoint(
    data: Path, trained: Path, with_nan: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It was saved so; an older one may lead there again."""
    folder = tmp_path / "a"
    shutil.copytree(trained, folder)
    shutil.copy(with_nan, folder / "checkpoint_last.pt")
    assert train(data, folder, "--max-update", 8) == 2
    assert f"checkpoint_last.pt: parameter {QUERY} is not finite" in capsys.readouterr().err


def test_a_resume_does_not_skip_an_intact_file_that_is_no_checkpoint(
    data: Path, trained: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "a"
    shutil.copytree(trained, folder)
    torch.save({"weights": torch.ones(3)}, folder / "checkpoint_last.pt")
    assert train(data, folder, "--max-update", 8) == 2
    assert "checkpoint_last.pt is truncated or not a fairseq checkpoint" in capsys.readouterr().err


def test_the_moving_average_that_a_model_starts_from_is_checked(flipped: Path) -> None:
    with pytest.raises(SurfaceFusionError, match=r"flipped\.pt is damaged"):
        checkpoint_utils.load_ema_from_checkpoint(str(flipped))
