"""Statistics are summed over two processes while the backward runs."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist

from surface_fusion.criterions.statistics import OverlappedStatistics, as_vector
from tests.helpers import warm_processes


def output(loss: float, ntokens: int) -> dict[str, Any]:
    return {"loss": torch.tensor(loss), "ntokens": ntokens, "sample_size": ntokens}


def two_processes(rank: int, folder: str) -> None:
    dist.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    sums = OverlappedStatistics()
    single = [output(1.5 + rank, 3 + rank)]
    sums.expect([0.25, rank])
    sums.add(single[0])
    sums.start(torch.tensor(128.0))
    results = [sums.take(single)]

    several = [output(float("nan") if rank else 1.0, 5), output(2.0, 6)]
    sums.expect([2.0])
    for each in several:
        sums.add(each)
    sums.start(torch.tensor(float(1 - rank)))  # rank 1 ran a dummy batch, whose values do not count
    results.append(sums.take(several))
    torch.save(results, f"{folder}/{rank}.pt")
    dist.destroy_process_group()


@pytest.mark.slow
def test_two_processes_share_the_sums_of_their_statistics(tmp_path: Path) -> None:
    warm_processes.in_two(two_processes, str(tmp_path))
    for rank in range(2):
        assert torch.load(tmp_path / f"{rank}.pt") == [
            ({"loss": 4.0, "ntokens": 7, "sample_size": 7}, [0.5, 1]),
            ({"loss": 3.0, "ntokens": 11, "sample_size": 11}, [4.0]),
        ]


@pytest.fixture
def group(tmp_path: Path) -> Any:
    dist.init_process_group("gloo", f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def test_statistics_that_are_not_expected_are_not_sent(group: None) -> None:
    sums, logged = OverlappedStatistics(), output(1.0, 2)
    sums.add(logged)
    sums.start(torch.ones(()))
    assert sums.take([logged]) is None
    sums.expect([])
    sums.add(logged)
    sums.start(torch.ones(()))
    sums.start(torch.ones(()))  # fairseq goes through the batch again to find out where a NaN comes from
    assert sums.take([logged]) == ({"loss": 1, "ntokens": 2, "sample_size": 2}, [])
    assert sums.take([logged]) is None


@pytest.mark.parametrize(
    "change",
    [
        lambda logged: [{**logged[0], "ntokens": 9}],
        lambda logged: [{**logged[0], "extra": 1}],
        lambda logged: [logged[0], logged[0]],
        lambda logged: [],
    ],
)
def test_statistics_changed_by_a_task_are_not_reused(group: None, change: Any) -> None:
    sums, logged = OverlappedStatistics(), [output(1.0, 2)]
    sums.expect([])
    sums.add(logged[0])
    sums.start(torch.ones(()))
    assert sums.take(change(logged)) is None


def test_an_update_discards_the_sums_of_an_unfinished_one(group: None) -> None:
    """Which ran out of memory in the middle."""
    sums, logged = OverlappedStatistics(), output(1.0, 2)
    sums.expect([])
    sums.add(output(5.0, 7))
    sums.expect([])
    sums.add(logged)
    sums.start(torch.ones(()))
    assert sums.take([logged]) == ({"loss": 1, "ntokens": 2, "sample_size": 2}, [])


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_statistics_are_summed_on_a_gpu(tmp_path: Path) -> None:
    dist.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    sums = OverlappedStatistics()
    try:
        for _ in range(3):
            logged = {"ntokens": 3, "loss": torch.tensor(1.5, device="cuda"), "sample_size": 4}
            logged["nll_loss"] = torch.tensor(0.5, device="cuda")
            sums.expect([0.25])
            sums.add(logged)
            sums.start(torch.ones((), device="cuda"))
            found = sums.take([logged])
            assert found == ({"ntokens": 3, "loss": 1.5, "sample_size": 4, "nll_loss": 0.5}, [0.25])
            assert found is not None and list(found[0]) == list(logged)
    finally:
        dist.destroy_process_group()


def test_values_on_the_host_precede_values_on_the_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("surface_fusion.criterions.statistics._is_on_gpu", torch.is_tensor)
    values = {"loss": torch.tensor(1.5), "n": 3, "nll": torch.tensor([2.5]), "m": 4.25}
    order, vector = as_vector(values, torch.device("cpu"))
    assert (order, vector.tolist()) == (["n", "m", "loss", "nll"], [3, 4.25, 1.5, 2.5])
    assert vector.dtype == torch.double
