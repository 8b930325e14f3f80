"""Averaging: exact in float64, of one model only, and what it leaves out."""

import pytest
import torch

from surface_fusion import SurfaceFusionError
from surface_fusion.averaging import average_checkpoints, last_checkpoints


def write(path, model, updates=1, **extra_state):
    """A checkpoint file as fairseq writes it, with *model* as its parameters."""
    state = {
        "args": None,
        "cfg": {"model": {"_name": "transformer_surface_fusion"}, "task": {"_name": "translation"}},
        "model": model,
        "optimizer_history": [
            {"optimizer_name": "FairseqAdam", "lr_scheduler_state": {"best": 3.0}, "num_updates": updates}
        ],
        "extra_state": {"train_iterator": {"epoch": 1}, **extra_state},
        "last_optimizer_state": {"state": {0: {"exp_avg": torch.zeros(1000)}}},
    }
    torch.save(state, path)
    return str(path)


def average_of(tmp_path, *models):
    return average_checkpoints([write(tmp_path / f"{i}.pt", model) for i, model in enumerate(models)])


@pytest.mark.parametrize("dtype, large", [(torch.float32, 2.0**24), (torch.float16, 2.0**11)])
def test_mean_is_exact_where_sums_in_the_parameters_own_dtype_are_not(tmp_path, dtype, large):
    values = [torch.tensor([large, -1.5], dtype=dtype), *[torch.tensor([1.0, 0.25], dtype=dtype)] * 2]
    assert (values[0] + values[1] + values[2])[0] == large
    mean = average_of(tmp_path, *({"w": value} for value in values))["model"]["w"]
    assert mean.dtype == dtype
    assert mean.equal(torch.tensor([(large + 2) / 3, -1 / 3], dtype=torch.float64).to(dtype))


def test_one_checkpoint_is_its_own_mean(tmp_path):
    value = torch.randn(3, 4)
    assert average_of(tmp_path, {"w": value})["model"]["w"].equal(value)


def test_integer_buffers_and_the_rest_are_the_last_checkpoints(tmp_path):
    paths = [
        write(tmp_path / f"{i}.pt", {"w": torch.ones(1), "count": torch.tensor([i])}, updates=10 * i)
        for i in (1, 2, 3)
    ]
    state = average_checkpoints(paths)
    assert state["model"]["count"].equal(torch.tensor([3]))
    assert state["optimizer_history"][-1]["num_updates"] == 30


def test_optimizer_state_and_ema_are_left_out_and_the_input_is_not_changed(tmp_path):
    path = write(tmp_path / "a.pt", {"w": torch.ones(1)}, ema={"w": torch.zeros(1)})
    state = average_checkpoints([path, path])
    assert state["last_optimizer_state"] is None
    assert "ema" not in state["extra_state"]
    again = torch.load(path)
    assert again["last_optimizer_state"] is not None and "ema" in again["extra_state"]


def test_shared_embeddings_stay_shared(tmp_path):
    def model(value):
        shared = torch.full((4, 2), value)
        return {"encoder.embed": shared, "decoder.embed": shared, "other": torch.full((4, 2), value)}

    mean = average_of(tmp_path, model(1.0), model(2.0))["model"]
    assert mean["encoder.embed"].equal(torch.full((4, 2), 1.5))
    assert mean["encoder.embed"].data_ptr() == mean["decoder.embed"].data_ptr()
    assert mean["encoder.embed"].data_ptr() != mean["other"].data_ptr()


def test_result_is_plain_enough_to_load_safely(tmp_path):
    torch.save(average_of(tmp_path, {"w": torch.ones(2)}, {"w": torch.zeros(2)}), tmp_path / "mean.pt")
    state = torch.load(tmp_path / "mean.pt", weights_only=True)
    assert state["cfg"]["task"] == {"_name": "translation"}
    assert state["model"]["w"].tolist() == [0.5, 0.5]


@pytest.mark.parametrize(
    "second, words",
    [
        (
            {"a": torch.ones(2), "b": torch.ones(3)},
            r"parameter b has shape \(3,\) in .*1.pt but \(2,\) in .*0.pt",
        ),
        ({"a": torch.ones(2)}, r"1.pt lacks parameter b, which .*0.pt has"),
        (
            {"a": torch.ones(2), "b": torch.ones(2), "c": torch.ones(1)},
            r"1.pt has parameter c, which .*0.pt lacks",
        ),
    ],
)
def test_other_models_are_refused_by_parameter_and_file(tmp_path, second, words):
    with pytest.raises(SurfaceFusionError, match=words):
        average_of(tmp_path, {"a": torch.ones(2), "b": torch.ones(2)}, second)


@pytest.fixture
def folder(tmp_path):
    names = (
        "checkpoint2",
        "checkpoint9",
        "checkpoint10",
        "checkpoint_1_5",
        "checkpoint_1_20",
        "checkpoint_2_100",
    )
    for name in (*names, "checkpoint_best", "checkpoint_last"):
        (tmp_path / f"{name}.pt").touch()
    return tmp_path


def test_last_checkpoints_are_those_of_the_latest_epochs_or_updates(folder):
    def names(*args):
        return [path.removeprefix(f"{folder}/") for path in last_checkpoints(str(folder), *args)]

    assert names(2, False) == ["checkpoint9.pt", "checkpoint10.pt"]
    assert names(2, True) == ["checkpoint_1_20.pt", "checkpoint_2_100.pt"]


@pytest.mark.parametrize(
    "count, words", [(4, "has 3 files named checkpointEPOCH.pt, not 4"), (0, "0 checkpoints")]
)
def test_too_many_or_too_few_are_refused(folder, count, words):
    with pytest.raises(SurfaceFusionError, match=words):
        last_checkpoints(str(folder), count, by_update=False)


def test_missing_folder_is_refused(tmp_path):
    with pytest.raises(SurfaceFusionError, match="nowhere does not exist"):
        last_checkpoints(str(tmp_path / "nowhere"), 1, by_update=False)
