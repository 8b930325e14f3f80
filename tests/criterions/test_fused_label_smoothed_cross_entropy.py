"""Losses, logged values and gradients of the criterion equal those of fairseq's, on each path.

Also tests ``modules/fused_loss.py``.
"""

import math
from itertools import cycle, islice
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import options, tasks
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.distributed import utils as distributed
from fairseq.logging import metrics
from fairseq.nan_detector import NanDetector
from fairseq.trainer import Trainer
from torch import Tensor

from surface_fusion.criterions.fused_label_smoothed_cross_entropy import (
    FusedLabelSmoothedCrossEntropyCriterion,
)
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.step import PackedStep
from tests.helpers.small_training import TRAIN
from tests.helpers.tiny import PAD, USER_DIR, batch, build, log_probs, pad_rows, shaken

ATT = ("--surfacefusion", "att")
HARD = (*ATT, "--sf-gate", "0.8")
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
MODELS = {
    "hard": HARD,
    "learned gate": ATT,
    "renormalised": (*HARD, "--sf-renormalize"),
    "renormalised learned gate": (*ATT, "--sf-renormalize"),
    "soft": (*ATT, "--sf-mode", "soft", "--sf-softmax-tau", "0.7"),
    "mean": ("--surfacefusion", "mean", "--sf-gate", "0.6"),
    "max, learned gate": ("--surfacefusion", "max"),
    "no fusion": (),
    "layer-wise": ("--layer-wise-attention",),
}
UNNORMALISED = ("hard", "learned gate", "mean", "max, learned gate")
WAYS = {
    "packed": "batches without padding, on the CPU",
    "fused": "output layer and loss fused; layers with padding, because of an optimizer that is not "
    "flat_adam",
    "plain": "fairseq's loss, because of --sf-plain",
}
SAMPLES = [batch((5, 7, 3), (6, 4, 5), extra_src=1, extra_tgt=2), batch((2, 8), (9, 1), seed=1)]
_, TASK = build()


def criterion(way: str, **options: Any) -> FusedLabelSmoothedCrossEntropyCriterion:
    settings = {"sentence_avg": False, "label_smoothing": 0.1, **options}
    return FusedLabelSmoothedCrossEntropyCriterion(TASK, **settings, sf_plain=way == "plain")


def fairseqs(**options: Any) -> LabelSmoothedCrossEntropyCriterion:
    return LabelSmoothedCrossEntropyCriterion(
        TASK, **{"sentence_avg": False, "label_smoothing": 0.1, **options}
    )


def model_of(way: str, *flags: str) -> Any:
    """In float64 and training mode, its parameters flat for the packed way."""
    model = shaken(*flags).double().train()
    if way == "packed":
        model.flat = FlatParameters.of(model.parameters())
    return model


def assert_logged(got: dict[str, Any], expected: dict[str, Any]) -> None:
    assert got.keys() - {"normalized_nll_loss"} == expected.keys()
    for name, value in expected.items():
        assert float(got[name]) == pytest.approx(float(value), rel=1e-6), name


def normalized_nll(model: Any, sample: dict[str, Any]) -> float:
    """Of the targets under the fused distribution, made to sum to 1."""
    with torch.no_grad():
        probs = log_probs(model, sample).exp()
    target = sample["target"]
    picked = (probs / probs.sum(-1, keepdim=True)).gather(-1, target[..., None])[..., 0]
    return -picked[target.ne(PAD)].log().sum().item()


def said_by_criterion(caplog: pytest.LogCaptureFixture) -> list[str]:
    """What the log tells about ways; fairseq says more, where a test before has turned its log up."""
    records = [
        record
        for record in caplog.records
        if record.name == "surface_fusion.criterions.fused_label_smoothed_cross_entropy"
    ]
    return [record.getMessage().partition(": ")[2] for record in records]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
def test_two_batches_of_an_update_equal_fairseqs_criterion(
    name: str, way: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Losses, what is logged, and the sum of the gradients."""
    model, reference = model_of(way, *MODELS[name]), model_of("plain", *MODELS[name])
    ours = criterion(way)
    with caplog.at_level("INFO", "surface_fusion.criterions.fused_label_smoothed_cross_entropy"):
        for sample in SAMPLES:
            loss, size, logged = ours(model, sample)
            expected, expected_size, expected_log = fairseqs()(reference, sample)
            assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and size == expected_size
            assert_logged(logged, expected_log)
            if name in UNNORMALISED:
                nll = normalized_nll(reference, sample)
                assert float(logged["normalized_nll_loss"]) == pytest.approx(nll, rel=1e-5)
            else:
                assert "normalized_nll_loss" not in logged
            (2 * loss).backward()
            (2 * expected).backward()
    for (n, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        gradient = torch.zeros_like(q) if q.grad is None else q.grad
        torch.testing.assert_close(p.grad, gradient, rtol=1e-4, atol=2e-5, msg=n)
    assert said_by_criterion(caplog) == [WAYS[way]]


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    "options",
    [
        {"sentence_avg": True},
        {"ignore_prefix_size": 2},
        {"report_accuracy": True},
        {"report_accuracy": True, "ignore_prefix_size": 1, "label_smoothing": 0.0},
    ],
    ids=str,
)
@pytest.mark.parametrize("flags", [HARD, ATT, ()], ids=["hard", "learned gate", "no fusion"])
def test_flags_of_fairseqs_criterion_have_the_same_effect(
    flags: tuple[str, ...], options: dict[str, Any], way: str
) -> None:
    model, reference = model_of(way, *flags), model_of("plain", *flags)
    loss, size, logged = criterion(way, **options)(model, SAMPLES[0])
    expected, expected_size, expected_log = fairseqs(**options)(reference, SAMPLES[0])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6) and size == expected_size
    assert_logged(logged, expected_log)


@pytest.mark.parametrize("ignored", [0, 2])
@pytest.mark.parametrize("way", WAYS)
def test_left_padded_targets_equal_fairseqs_criterion(
    way: str, ignored: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``--left-pad-target``, also with a prefix that is ignored, and a source that is padded on the right."""
    monkeypatch.setattr(TASK.cfg, "left_pad_target", True)
    sample = batch((5, 7, 3), (6, 4, 5))

    def repadded(tokens: Tensor, left: bool) -> Tensor:
        return pad_rows([row[row.ne(PAD)] for row in tokens], left)

    net = sample["net_input"]
    net["src_tokens"] = repadded(net["src_tokens"], False)
    net["prev_output_tokens"] = repadded(net["prev_output_tokens"], True)
    sample["target"] = repadded(sample["target"], True)
    options = {"ignore_prefix_size": ignored}
    loss, _, logged = criterion(way, **options)(model_of(way, *HARD), sample)
    expected, _, expected_log = fairseqs(**options)(model_of("plain", *HARD), sample)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_logged(logged, expected_log)


def test_postnorm_v1_uses_the_plain_loss(caplog: pytest.LogCaptureFixture) -> None:
    flags = (*ATT, "--sf-mode", "postnorm_v1")
    with caplog.at_level("INFO", "surface_fusion.criterions.fused_label_smoothed_cross_entropy"):
        loss, _, logged = criterion("packed")(model_of("packed", *flags), SAMPLES[0])
    expected, _, expected_log = fairseqs()(model_of("plain", *flags), SAMPLES[0])
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert_logged(logged, expected_log)
    assert said_by_criterion(caplog) == ["fairseq's loss, because of --sf-mode postnorm_v1"]


@pytest.mark.parametrize("way", WAYS)
def test_losses_without_reduction_equal_fairseqs(way: str) -> None:
    """``reduce=False``, as ``fairseq-validate`` may ask."""
    model = model_of(way, *HARD)
    loss, _, logged = criterion(way)(model, SAMPLES[0], reduce=False)
    expected, _, expected_log = fairseqs()(model, SAMPLES[0], reduce=False)
    assert loss.equal(expected) and loss.numel() == SAMPLES[0]["target"].numel()
    assert logged["nll_loss"].equal(expected_log["nll_loss"])


@pytest.mark.parametrize("way", WAYS)
def test_validation_equals_fairseqs_criterion(way: str) -> None:
    flags = (*HARD, "--dropout", "0.4", "--attention-dropout", "0.4")
    model, ours = model_of(way, *flags), criterion(way)
    model.eval()
    for sample in SAMPLES:
        with torch.no_grad():
            loss, _, logged = ours(model, sample)
            _, _, expected_log = fairseqs()(model, sample)
        assert not loss.requires_grad
        assert_logged(logged, expected_log)
    assert all(p.grad is None or not p.grad.any() for p in model.parameters())
    model.train()
    assert ours(model, SAMPLES[0])[0].item() != pytest.approx(fairseqs()(model.eval(), SAMPLES[0])[0].item())


@pytest.mark.parametrize("way", WAYS)
def test_a_dummy_batch_adds_no_gradient(way: str) -> None:
    """A process without a batch left computes one that does not count."""
    model, ours = model_of(way, *HARD), criterion(way)
    ours(model, SAMPLES[0])[0].backward()
    before = [p.grad.clone() for p in model.parameters()]
    loss, _, _ = ours(model, SAMPLES[1])
    loss *= 0
    loss.backward()
    assert all(p.grad.equal(g) for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("way", WAYS)
def test_normalised_perplexity_is_that_of_the_renormalised_distribution(way: str) -> None:
    model, ours = model_of(way, *HARD), criterion(way)
    with metrics.aggregate(new_root=True) as logged:
        ours.reduce_metrics([ours(model, sample)[2] for sample in SAMPLES])
    values = logged.get_smoothed_values()
    tokens = sum(sample["ntokens"] for sample in SAMPLES)
    nll = sum(normalized_nll(model, sample) for sample in SAMPLES) / tokens
    assert values["normalized_ppl"] == pytest.approx(math.exp(nll), rel=1e-2)  # fairseq rounds
    assert values["normalized_nll_loss"] == pytest.approx(nll / math.log(2), abs=1e-3)
    assert values["normalized_ppl"] < values["ppl"]


def test_perplexity_of_a_distribution_is_logged_once() -> None:
    model, ours = model_of("packed"), criterion("packed")
    with metrics.aggregate(new_root=True) as logged:
        ours.reduce_metrics([ours(model, SAMPLES[0])[2]])
    assert {"loss", "nll_loss", "ppl"} == set(logged.get_smoothed_values())


def test_two_models_of_one_criterion_are_computed_independently(caplog: pytest.LogCaptureFixture) -> None:
    """The criterion belongs to the task; a second model is not taken for the first."""
    packed, other, ours = (
        model_of("packed", *HARD),
        shaken(*ATT, seed=2).double().train(),
        criterion("packed"),
    )
    with caplog.at_level("INFO", "surface_fusion.criterions.fused_label_smoothed_cross_entropy"):
        for _ in range(2):
            for model in (packed, other):
                expected = fairseqs()(model, SAMPLES[0])[0].item()
                assert ours(model, SAMPLES[0])[0].item() == pytest.approx(expected, rel=1e-6)
    assert said_by_criterion(caplog) == [WAYS["packed"], WAYS["fused"]]


# Trainings

FAST = ("--optimizer", "flat_adam", "--criterion", "fused_label_smoothed_cross_entropy")
NO_DROPOUT = ("--dropout", 0, "--attention-dropout", 0)


class Training:
    """fairseq's trainer on one fixed sequence of batches."""

    def __init__(self, data: Path | str, *flags: object, rank: int = 0, processes: int = 1) -> None:
        argv = [data, *TRAIN, *FAST, *NO_DROPOUT, "--user-dir", USER_DIR, *flags]
        cfg = convert_namespace_to_omegaconf(
            options.parse_args_and_arch(options.get_training_parser(), list(map(str, argv)))
        )
        cfg.distributed_training.distributed_world_size = processes
        cfg.distributed_training.distributed_rank = rank
        task = tasks.setup_task(cfg.task)
        task.load_dataset("train")
        torch.manual_seed(1)
        self.trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
        samples = list(self.trainer.get_train_iterator(1, shard_batch_itr=False).next_epoch_itr())
        self.samples = cycle(samples[:7])
        self.losses: list[float] = []
        train_step = task.train_step

        def watched(*args: Any, **kwargs: Any) -> Any:
            loss, size, logged = train_step(*args, **kwargs)
            self.losses.append(float(logged["loss"]) / logged["ntokens"])
            return loss, size, logged

        task.train_step = watched

    def run(self, updates: int, update_freq: int = 1) -> list[float]:
        """The losses a token of the next *updates* updates' batches."""
        self.losses.clear()
        for _ in range(updates):
            self.trainer.train_step(list(islice(self.samples, update_freq)))
        return list(self.losses)

    def skip(self, batches: int) -> None:
        list(islice(self.samples, batches))

    @property
    def parameters(self) -> dict[str, Tensor]:
        return {name: p.detach().clone() for name, p in self.trainer.model.named_parameters()}


@pytest.mark.slow
@pytest.mark.parametrize("update_freq", [1, 2])
@pytest.mark.parametrize(
    "flags",
    [("--sf-gate", 0.8), ("--sf-gate", 0, *PRE_NORM)],
    ids=["post-norm hard", "pre-norm learned gate"],
)
def test_twenty_packed_updates_equal_plain_ones(
    data: Path, flags: tuple[object, ...], update_freq: int
) -> None:
    plain = Training(data, *flags, "--sf-plain").run(20, update_freq)
    fast = Training(data, *flags).run(20, update_freq)
    half = 10 * update_freq
    # Rounding grows with each update, on some processors faster; an error shows in the first half.
    assert fast[:half] == pytest.approx(plain[:half], rel=1e-6)
    assert fast[half:] == pytest.approx(plain[half:], rel=1e-4)
    assert plain[-1] < 0.95 * plain[0]


@pytest.mark.slow
@pytest.mark.parametrize("first, second", [((), ("--sf-plain",)), (("--sf-plain",), ())])
def test_a_resume_may_switch_between_fast_and_plain(
    data: Path, tmp_path: Path, first: tuple[str, ...], second: tuple[str, ...]
) -> None:
    whole = Training(data, *first)
    expected = whole.run(12)
    begun = Training(data, *first)
    assert begun.run(5) == expected[:5]
    path = str(tmp_path / "checkpoint.pt")
    begun.trainer.consolidate_optimizer()
    begun.trainer.save_checkpoint(path, {"train_iterator": {"epoch": 1}})
    resumed = Training(data, *second)
    assert list(resumed.parameters) == list(begun.parameters)
    resumed.trainer.load_checkpoint(path)
    resumed.skip(5)
    assert resumed.trainer.get_num_updates() == 5
    assert resumed.run(7) == pytest.approx(expected[5:], rel=1e-5)


@pytest.mark.parametrize(
    "flags, way",
    [
        ((), WAYS["packed"]),
        (("--sf-plain",), WAYS["plain"]),
        (("--optimizer", "adam"), WAYS["fused"]),
        (("--encoder-layerdrop", 0.1), "because of LayerDrop"),
        (("--checkpoint-activations",), "because of --checkpoint-activations"),
        (("--no-cross-attention",), "because of --no-cross-attention"),
    ],
    ids=str,
)
def test_the_reason_for_the_plain_path_is_logged_once(
    data: Path, flags: tuple[str, ...], way: str, caplog: pytest.LogCaptureFixture
) -> None:
    training = Training(data, *flags)
    with caplog.at_level("INFO", "surface_fusion"):
        losses = training.run(3)
        training.trainer.valid_step(next(training.samples))
    assert all(map(math.isfinite, losses))
    said = said_by_criterion(caplog)
    assert len(said) == 1 and said[0].endswith(way)


def test_state_dict_names_and_shapes_equal_the_plain_model(data: Path) -> None:
    fast, plain = Training(data), Training(data, "--sf-plain")
    fast.run(2)
    states = [training.trainer.model.state_dict() for training in (fast, plain)]
    assert [(n, x.shape) for n, x in states[0].items()] == [(n, x.shape) for n, x in states[1].items()]


def two_process_worker(rank: int, folder: str, data: str, update_freq: int) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    together = ("--distributed-backend", "gloo", "--ddp-backend", "no_c10d")
    training = Training(data, *together, rank=rank, processes=2)
    # What is logged was sent early: nothing is left to sum behind the backward.
    setattr(distributed, "all_reduce_dict", lambda *_, **__: pytest.fail("summed again"))  # noqa: B010
    for _ in range(4):
        training.skip(rank * update_freq)
        training.run(1, update_freq=update_freq)
        training.skip((1 - rank) * update_freq)
    step = training.trainer.get_criterion().packed_step(training.trainer.model)
    assert isinstance(step, PackedStep) and distributed.get_data_parallel_world_size() == 2
    torch.save(training.parameters, f"{folder}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
@pytest.mark.parametrize("update_freq", [1, 2])
def test_two_processes_equal_one_with_both_batches(data: Path, tmp_path: Path, update_freq: int) -> None:
    """The average begins with the backward of an update's last batch."""
    given = (str(tmp_path), str(data), update_freq)
    torch.multiprocessing.spawn(two_process_worker, given, nprocs=2)
    alone = Training(data)
    alone.run(4, update_freq=2 * update_freq)
    for rank in range(2):
        parameters = torch.load(tmp_path / f"{rank}.pt")
        for (name, got), expected in zip(parameters.items(), alone.parameters.values(), strict=True):
            if "k_proj.bias" not in name:  # which changes nothing: its gradient is rounding
                torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5, msg=name)


def test_a_parameter_frozen_between_updates_is_no_longer_trained() -> None:
    model = shaken(*HARD).train()
    flat = FlatParameters.of(model.parameters())
    criterion = FusedLabelSmoothedCrossEntropyCriterion(TASK, False, 0.1)
    criterion(model, batch())[0].backward()
    assert criterion.packed_step(model) is not None
    assert model.encoder.layers[0].fc1.weight.grad.abs().sum() > 0
    flat.zero_grad()
    model.encoder.layers[0].requires_grad_(False)
    criterion(model, batch())[0].backward()
    assert criterion.packed_step(model) is None
    assert model.encoder.layers[0].fc1.weight.grad.abs().sum() == 0
    assert model.encoder.layers[1].fc1.weight.grad.abs().sum() > 0


def test_nan_detector_names_the_module_in_a_packed_training(caplog: pytest.LogCaptureFixture) -> None:
    model = shaken(*HARD).train()
    flat = FlatParameters.of(model.parameters())
    criterion = FusedLabelSmoothedCrossEntropyCriterion(TASK, False, 0.1)
    criterion(model, batch())[0].backward()
    packed = criterion.packed_step(model)
    assert packed is not None and packed.packed.flat is flat
    model.decoder.layers[1].fc1.weight.data[0, 0] = float("nan")
    with NanDetector(model, backward=False):
        criterion(model, batch())
    assert "NaN detected in output of decoder.layers.1.fc1, " in caplog.text
    caplog.clear()
    criterion(model, batch())
    assert criterion.packed_step(model) is packed and not caplog.text, "packed again without the hooks"
