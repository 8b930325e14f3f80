"""The trainer does the same with fewer look-ups."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.dataclass.configs import FairseqConfig
from fairseq.utils import set_torch_seed
from omegaconf import DictConfig, OmegaConf

from surface_fusion import quick_trainer
from surface_fusion.quick_trainer import (
    ReadOnceConfig,
    build_quickly,
    compare_norms_later,
    sum_over_processes,
)


class Trainer:
    """What of fairseq's trainer the functions look at."""

    tpu = cuda = False
    updates = 3

    def __init__(
        self, cfg: DictConfig, task: object, model: str, criterion: object, quantizer: object = None
    ) -> None:
        self.cfg = cfg
        self.quantizer = quantizer

    def get_num_updates(self) -> int:
        return self.updates


@pytest.fixture
def cfg() -> DictConfig:
    return OmegaConf.create(OmegaConf.structured(FairseqConfig()))


def built(cfg: DictConfig, criterion: object = None) -> Any:
    trainer = Trainer.__new__(Trainer)
    build_quickly(Trainer.__init__, trainer, cfg, None, "model", criterion)
    return trainer


def test_a_setting_is_looked_up_once_and_again_after_it_was_set(
    cfg: DictConfig, monkeypatch: pytest.MonkeyPatch
) -> None:
    trainer, looked_up = built(cfg), []
    original = DictConfig.__getattr__
    monkeypatch.setattr(
        DictConfig, "__getattr__", lambda self, key: looked_up.append(key) or original(self, key)
    )
    assert [trainer.cfg.common.seed for _ in range(3)] == [1, 1, 1]
    assert looked_up == ["common", "seed"]
    trainer.cfg.common.seed = 7
    assert trainer.cfg.common.seed == 7
    trainer.cfg.common["seed"] = 8
    assert trainer.cfg.common.seed == 8


def test_it_is_a_configuration_still(cfg: DictConfig) -> None:
    before = OmegaConf.to_container(cfg)
    trainer = built(cfg)
    _ = trainer.cfg.common.seed, trainer.cfg.dataset.max_tokens, trainer.cfg.optimization.lr
    assert OmegaConf.is_config(trainer.cfg) and isinstance(trainer.cfg.common, ReadOnceConfig)
    assert OmegaConf.to_container(trainer.cfg) == before
    with pytest.raises(AttributeError):
        _ = trainer.cfg.common.sed


def test_a_criterion_may_prepare(cfg: DictConfig) -> None:
    asked = []
    built(cfg, Namespace(prepare=lambda *args: asked.append(args)))
    built(cfg, Namespace())
    assert asked == [("model", cfg)]


def test_what_else_fairseqs_trainer_is_given(cfg: DictConfig) -> None:
    """MegatronTrainer passes it on by name."""
    for how in (("q",), {}), ((), {"quantizer": "q"}):
        trainer = Trainer.__new__(Trainer)
        build_quickly(Trainer.__init__, trainer, cfg, None, "model", None, *how[0], **how[1])
        assert trainer.quantizer == "q"


def test_the_seed_is_fairseqs(cfg: DictConfig) -> None:
    trainer = built(cfg)
    set_torch_seed(cfg.common.seed + 3)
    expected = torch.rand(5)
    quick_trainer.set_seed(lambda _: pytest.fail("not for a TPU"), trainer)
    assert torch.rand(5).equal(expected)


def test_a_tpu_is_left_to_fairseq(cfg: DictConfig) -> None:
    trainer, asked = built(cfg), []
    trainer.tpu = True
    quick_trainer.set_seed(asked.append, trainer)
    assert asked == [trainer]


def all_reduce_dict(data: Any, device: Any, group: Any) -> Any:
    """What fairseq's function gives in one process."""
    return {name: torch.as_tensor(value, dtype=torch.double) for name, value in data.items()}


def test_sums_on_a_cpu_are_fairseqs() -> None:
    found = sum_over_processes(all_reduce_dict, {"a": 2}, torch.device("cpu"), None)
    assert found == all_reduce_dict({"a": 2}, None, None)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_sums_on_a_gpu_come_back_in_one_piece(tmp_path: Path) -> None:
    device = torch.device("cuda")
    data = {"loss": torch.tensor(1.5, device=device), "n": 3, "one": torch.tensor([4], device=device)}
    data |= {"time": 0.25, "host": torch.tensor(7.0)}
    torch.distributed.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        found = sum_over_processes(all_reduce_dict, data, device, None)
        pairs = {"pair": torch.ones(2, device=device)}
        assert sum_over_processes(lambda *given: given, pairs, device, None) == (pairs, device, None)
    finally:
        torch.distributed.destroy_process_group()
    assert list(found) == list(data) and not any(value.is_cuda for value in found.values())
    assert [value.tolist() for value in found.values()] == [1.5, 3, [4], 0.25, 7]
    assert {value.dtype for value in found.values()} == {torch.double}


def test_norms_on_a_cpu_are_compared_by_fairseq(cfg: DictConfig) -> None:
    asked = []
    trainer = built(cfg)
    for trainer._grad_norm_buf in (None, torch.zeros(2)):
        compare_norms_later(lambda trainer, norm: asked.append(norm), trainer, torch.tensor(3.0))
    assert asked == [3, 3]


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_norms_on_a_gpu_are_compared_an_update_later(tmp_path: Path, cfg: DictConfig) -> None:
    trainer = built(cfg)
    trainer._grad_norm_buf = torch.zeros(2, dtype=torch.double, device="cuda")
    trainer.data_parallel_process_group, trainer.data_parallel_rank = None, 1

    def never(*given: Any) -> None:
        raise AssertionError

    torch.distributed.init_process_group("nccl", f"file://{tmp_path}/store", rank=0, world_size=1)
    try:
        compare_norms_later(never, trainer, torch.tensor(3.0))  # the other process's norm stays 0
        with pytest.raises(FloatingPointError, match=r"of the update before differ.*\[0.0, 3.0\]"):
            compare_norms_later(never, trainer, torch.tensor(3.0))
        trainer.norms_on_host.fill_(3.0)
        compare_norms_later(never, trainer, torch.tensor(4.0))
    finally:
        torch.distributed.destroy_process_group()
