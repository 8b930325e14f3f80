"""The trainer does the same with fewer look-ups."""

import os
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import fairseq.trainer
import numpy as np
import pytest
import torch
from fairseq.data import FairseqDataset
from fairseq.dataclass.configs import FairseqConfig
from fairseq.tasks import FairseqTask
from fairseq.tasks.translation import TranslationTask
from fairseq.utils import set_torch_seed
from omegaconf import DictConfig, OmegaConf

from surface_fusion.training import trainer
from surface_fusion.training.trainer import (
    ReadOnceConfig,
    announce_sums,
    build_quickly,
    compare_norms_later,
    is_fairseqs_loop,
    keep_data_workers,
    send_norm_along,
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
        self.criterion = criterion
        self.quantizer = quantizer

    def get_criterion(self) -> object:
        return self.criterion

    def get_num_updates(self) -> int:
        return self.updates


@pytest.fixture
def cfg() -> DictConfig:
    return OmegaConf.create(OmegaConf.structured(FairseqConfig()))


def built(cfg: DictConfig, criterion: object = None, task: object = None) -> Any:
    trainer = Trainer.__new__(Trainer)
    build_quickly(Trainer.__init__, trainer, cfg, task, "model", criterion)
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


def test_a_task_has_its_settings_quickly(cfg: DictConfig) -> None:
    task = Namespace(cfg=OmegaConf.create({"eval_bleu": True}))
    built(cfg, task=task)
    assert task.cfg.eval_bleu and isinstance(task.cfg, ReadOnceConfig)


@pytest.mark.parametrize(
    "remove",
    [
        lambda cfg: delattr(cfg, "a"),
        lambda cfg: cfg.__delitem__("a"),
        lambda cfg: cfg.pop("a"),
        lambda cfg: cfg.popitem(),
        lambda cfg: cfg.clear(),
    ],
    ids=["delattr", "del", "pop", "popitem", "clear"],
)
def test_what_is_removed_is_gone(remove: Callable[[Any], Any]) -> None:
    cfg: Any = ReadOnceConfig({"a": 1})
    assert cfg.a == 1
    remove(cfg)
    assert "a" not in cfg
    with pytest.raises(AttributeError):
        _ = cfg.a
    assert ReadOnceConfig({}).pop("a", 3) == 3


def test_what_refers_to_another_value_follows_it() -> None:
    root = OmegaConf.create({"task": {"impl": "${dataset.impl}"}, "dataset": {"impl": "mmap"}})
    trainer._read_once(root.task)
    assert root.task.impl == "mmap"
    root.dataset.impl = "raw"
    assert root.task.impl == "raw"


def test_the_schedule_of_the_learning_rate_looks_up_once(monkeypatch: pytest.MonkeyPatch) -> None:
    cfg = OmegaConf.create({"warmup_updates": 4})
    trainer = Namespace()

    def build(trainer: Any) -> None:
        trainer._lr_scheduler = Namespace(cfg=cfg)

    trainer.build_quick_schedule(build, trainer)
    looked_up: list[str] = []
    original = DictConfig.__getattr__
    monkeypatch.setattr(
        DictConfig, "__getattr__", lambda self, key: looked_up.append(key) or original(self, key)
    )
    assert [trainer._lr_scheduler.cfg.warmup_updates for _ in range(3)] == [4, 4, 4]
    assert looked_up == ["warmup_updates"]
    trainer.build_quick_schedule(lambda trainer: None, Namespace(_lr_scheduler=Namespace()))


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
    trainer.set_seed(lambda _: pytest.fail("not for a TPU"), trainer)
    assert torch.rand(5).equal(expected)


def test_a_tpu_is_left_to_fairseq(cfg: DictConfig) -> None:
    trainer, asked = built(cfg), []
    trainer.tpu = True
    trainer.set_seed(asked.append, trainer)
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


class OnGPU:
    """The buffer by which fairseq's trainer knows that there are several processes."""

    is_cuda = True

    def __len__(self) -> int:
        return 2


def of_two(cfg: DictConfig, rank: int) -> Any:
    trainer = built(cfg)
    trainer._grad_norm_buf, trainer.data_parallel_rank = OnGPU(), rank
    trainer.model = Namespace(training=True)
    return trainer


def update(trainers: list[Any], norms: list[float]) -> None:
    """What fairseq does in each update: statistics are summed, then gradients clipped and norms compared."""
    sent: list[list[float]] = []

    def keep(_: Any, outputs: Any, *extra: float, ignore: bool) -> tuple[Any, list[float]]:
        sent.append([*extra])
        return outputs, [*extra]

    for one in trainers:  # each for itself, to see what it sends
        norm = getattr(one, "norm_before", -1.0)
        send_norm_along(keep, one, ["log"], 5.0, 6.0, ignore=False)
        one.norm_before = norm
    sums = [torch.tensor(sum(column)) for column in zip(*sent, strict=True)]
    for one in trainers:
        found = send_norm_along(lambda *given, ignore: (given[1], sums), one, ["log"], 5.0, 6.0, ignore=False)
        assert found == (["log"], [10, 12])
    for one, norm in zip(trainers, norms, strict=True):
        compare_norms_later(lambda *_: pytest.fail("gathered already"), one, torch.tensor(norm))


def test_norms_on_gpus_are_compared_an_update_later(cfg: DictConfig) -> None:
    trainers = [of_two(cfg, 0), of_two(cfg, 1)]
    update(trainers, [3.0, 3.0])
    update(trainers, [2.0, 2.0])
    for one in trainers:  # an overflow: no norm
        del one.norm_before
    update(trainers, [3.0, 4.0])
    with pytest.raises(FloatingPointError, match=r"of the update before differ.*\[3.0, 4.0\]"):
        update(trainers, [3.0, 3.0])


def test_an_overflow_in_one_process_only_is_noticed(cfg: DictConfig) -> None:
    trainers = [of_two(cfg, 0), of_two(cfg, 1)]
    update(trainers, [3.0, 3.0])
    del trainers[1].norm_before
    with pytest.raises(FloatingPointError, match=r"differ between processes: \[3.0, -1.0\]"):
        update(trainers, [3.0, 3.0])


def test_otherwise_fairseq_compares(cfg: DictConfig) -> None:
    """On CPUs, in one process, and where statistics are not summed."""
    asked: list[Any] = []
    trainer = built(cfg)
    trainer.model = Namespace(training=True)
    for trainer._grad_norm_buf in (None, torch.zeros(2)):
        sums = send_norm_along(lambda *given, **how: (given, how), trainer, [], 1, ignore=True)
        assert sums == ((trainer, [], 1), {"ignore": True})
        compare_norms_later(lambda trainer, norm: asked.append(norm), trainer, torch.tensor(3.0))
    assert asked == [3, 3]


class Sent:
    """The sums that a criterion has sent early: of two processes that do the same."""

    def __init__(self) -> None:
        self.extra: list[float] = []

    def announce(self, extra: list[float], group: object) -> None:
        assert group == "group"
        self.extra = [2 * number for number in extra]

    def take(self, outputs: list[dict[str, float]]) -> Any:
        return ({name: 2 * value for name, value in outputs[0].items()}, self.extra) if self.extra else None


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_was_sent_early_is_not_summed_again(cfg: DictConfig, on_gpu: bool) -> None:
    trainer = of_two(cfg, 1)
    trainer._grad_norm_buf = trainer._grad_norm_buf if on_gpu else torch.zeros(2)
    trainer.criterion, trainer.data_parallel_process_group = Namespace(early_sums=Sent()), "group"
    trainer._sync_stats, trainer._local_cumulative_training_time = (lambda: True), (lambda: 1.25)
    trainer.norm_before = 3.0

    def train_step(trainer: Any, samples: list[int]) -> Any:
        logged = [{"loss": 1.5, "sample_size": 4}]
        return send_norm_along(lambda *_: pytest.fail("sent"), trainer, logged, 4.0, 1, 9.0, ignore=True)

    for _ in range(2):
        found = announce_sums(train_step, trainer, [])
        assert found == ([{"loss": 3.0, "sample_size": 8}], [8, 1, 2.5])
        assert vars(trainer).pop("norms_before", None) == ([0, 6] if on_gpu else None)
        trainer.norm_before = 3.0


def test_sums_are_announced_where_fairseq_asks_for_them(cfg: DictConfig) -> None:
    trainer = of_two(cfg, 0)
    trainer._sync_stats = lambda: False
    for trainer.criterion in (None, Namespace(early_sums=Sent())):
        assert announce_sums(lambda *given, **how: (given, how), trainer, [1], raise_oom=True) == (
            (trainer, [1]),
            {"raise_oom": True},
        )
    assert trainer.criterion.early_sums.extra == []


def test_validation_leaves_the_norm_for_the_next_update(cfg: DictConfig) -> None:
    trainers = [of_two(cfg, 0), of_two(cfg, 1)]
    update(trainers, [3.0, 4.0])
    trainers[0].model.training = False
    assert send_norm_along(lambda *given: (given[1], [*given[2:]]), trainers[0], [], 7) == ([], [7])
    trainers[0].model.training = True
    with pytest.raises(FloatingPointError):
        update(trainers, [3.0, 3.0])


class Numbers(FairseqDataset):
    """Sentences of random lengths; each says in which process it was read."""

    def __init__(self) -> None:
        self.src_sizes = self.tgt_sizes = np.random.RandomState(0).randint(3, 60, 64)

    def __len__(self) -> int:
        return 64

    def __getitem__(self, i: int) -> tuple[int, int]:
        return i, os.getpid()

    def num_tokens(self, i: int) -> int:
        return int(self.src_sizes[i])

    def size(self, i: int) -> int:
        return self.num_tokens(i)

    def collater(self, samples: list[tuple[int, int]]) -> list[tuple[int, int]]:
        return samples


def epochs(cfg: DictConfig, wrap: Any, dataset: Any, count: int = 3, workers: int = 1) -> list[list[Any]]:
    """The batches of *count* epochs as fairseq's trainer comes to them, with ``--grouped-shuffling``."""
    trainer = built(cfg)
    trainer.task = FairseqTask(Namespace())

    def get_train_iterator(trainer: Any, epoch: int) -> Any:
        return trainer.task.get_batch_iterator(
            dataset,
            max_sentences=4,
            seed=epoch,
            epoch=epoch,
            num_shards=2,
            num_workers=workers,
            grouped_shuffling=True,
            update_epoch_batch_itr=True,
        )

    found = []
    for epoch in range(1, count + 1):
        iterator = wrap(get_train_iterator, trainer, epoch)
        found.append(list(iterator.next_epoch_itr(shuffle=True)))
    return found


def test_data_workers_stay_from_epoch_to_epoch(cfg: DictConfig) -> None:
    expected = epochs(cfg, lambda make, *given: make(*given), Numbers(), workers=0)
    found = epochs(cfg, keep_data_workers, Numbers())
    numbers = [[[i for i, _ in batch] for batch in epoch] for epoch in found]
    assert numbers == [[[i for i, _ in batch] for batch in epoch] for epoch in expected]
    assert numbers[0] != numbers[1]
    processes = [{process for batch in epoch for _, process in batch} for epoch in found]
    assert len(processes[0]) == 1 and processes == [processes[0]] * 3


def test_batches_are_shuffled_again_after_a_curriculum_that_was_resumed(cfg: DictConfig) -> None:
    """The state of an epoch that was not shuffled; today's command line has no curriculum."""
    dataset = Numbers()
    trainer = built(cfg)
    trainer.task = FairseqTask(Namespace())

    def get_train_iterator(trainer: Any, epoch: int) -> Any:
        how = {
            "max_sentences": 4,
            "seed": 1,
            "epoch": epoch,
            "num_workers": 1,
            "update_epoch_batch_itr": True,
        }
        return trainer.task.get_batch_iterator(dataset, grouped_shuffling=True, **how)

    first = keep_data_workers(get_train_iterator, trainer, 1)
    first.load_state_dict({"version": 2, "epoch": 1, "iterations_in_epoch": 2, "shuffle": False})
    in_order = [[i for i, _ in batch] for batch in first.next_epoch_itr()]
    second = keep_data_workers(get_train_iterator, trainer, 2)
    batches = [[i for i, _ in batch] for batch in second.next_epoch_itr(shuffle=True)]
    expected = get_train_iterator(trainer, 2)
    assert batches == [list(batch) for batch in expected.ordered_batches(2, False, True)]
    assert [batch for batch in batches if batch in in_order] != in_order


def test_they_do_not_where_they_would_not_know_the_epoch(cfg: DictConfig) -> None:
    dataset = Numbers()
    type(dataset).can_reuse_epoch_itr_across_epochs = property(lambda self: False)  # type: ignore[method-assign]
    try:
        found = epochs(cfg, keep_data_workers, dataset, count=2)
    finally:
        del type(dataset).can_reuse_epoch_itr_across_epochs
    assert len({process for epoch in found for batch in epoch for _, process in batch}) == 2


def test_whose_loop_is_known() -> None:
    """fairseq's trainer, and a task that leaves its steps alone; of others nobody knows what they do."""

    class Task(FairseqTask):
        pass

    class Clamping(FairseqTask):
        def optimizer_step(self, optimizer: Any, model: Any, update_num: int) -> None:
            super().optimizer_step(optimizer, model, update_num)

    class Augmenting(FairseqTask):
        def train_step(self, *args: Any, **kwargs: Any) -> Any:
            return super().train_step(*args, **kwargs)

    class Subclass(fairseq.trainer.Trainer):
        pass

    def trainer(kind: Any, task: Any, ddp: str = "pytorch_ddp", **more: Any) -> Any:
        made = kind.__new__(kind)
        made.task, made.cfg = task, FairseqConfig()
        made.cfg.distributed_training.ddp_backend = ddp
        vars(made).update(more)
        return made

    own = fairseq.trainer.Trainer
    watched = Task(None)
    watched.train_step = lambda *args: None  # type: ignore[method-assign]
    assert is_fairseqs_loop(trainer(own, Task(None)))
    assert is_fairseqs_loop(trainer(own, TranslationTask.__new__(TranslationTask)))
    for task in (Clamping(None), Augmenting(None), watched):
        assert not is_fairseqs_loop(trainer(own, task))
    assert not is_fairseqs_loop(trainer(Subclass, Task(None)))
    for name in ("train_step", "clip_grad_norm", "_check_grad_norms"):
        assert not is_fairseqs_loop(trainer(own, Task(None), **{name: print}))
    assert not is_fairseqs_loop(trainer(own, Task(None), ddp="fully_sharded"))
