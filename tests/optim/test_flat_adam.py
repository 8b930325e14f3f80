"""``--optimizer flat_adam`` gives the numbers of fairseq's ``adam``, alone, in fp16 and in a training."""

import io
import math
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq import checkpoint_utils, options, tasks, utils
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.optim import FP16Optimizer, MemoryEfficientFP16Optimizer, build_optimizer
from fairseq.optim.adam import Adam
from fairseq.trainer import Trainer
from omegaconf import OmegaConf
from torch import Tensor, nn

from surface_fusion import SurfaceFusionError
from surface_fusion.cli.main import main
from surface_fusion.optim.flat_adam import FlatAdam
from surface_fusion.packed.flat_parameters import flat_of
from tests.helpers.small_training import TRAIN
from tests.helpers.tiny import USER_DIR

BETAS = (0.9, 0.98)
DEVICE = "cuda" if torch.cuda.is_available() else "cpu"  # fairseq clips on the GPU if there is one
CFG = {
    "_name": "flat_adam",
    "adam_betas": str(BETAS),
    "adam_eps": 1e-3,
    "weight_decay": 0.1,
    "lr": [0.01],
    "sf_plain": False,
}


def network(dtype: torch.dtype = torch.float32, grouped: bool = False) -> nn.Sequential:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 7), nn.LayerNorm(7))
    if grouped:  # another layout
        model[0].bias.flat_group = ("biases", 1)  # type: ignore[attr-defined]
        model[3].bias.flat_group = ("biases", 0)  # type: ignore[attr-defined]
    return model.to(DEVICE, dtype)


def build(model: nn.Module, **cfg: Any) -> FlatAdam:
    optimizer = build_optimizer(OmegaConf.create({**CFG, **cfg}), list(model.parameters()))
    assert isinstance(optimizer, FlatAdam)
    return optimizer


def common(fp16: bool, scale_window: int = 1000) -> dict[str, Any]:
    return {
        "bf16": not fp16,
        "fp16": fp16,
        "fp16_no_flatten_grads": True,
        "fp16_scale_window": scale_window,
        "fp16_init_scale": 128,
        "fp16_scale_tolerance": 0.0,
        "threshold_loss_scale": None,
        "min_loss_scale": 1e-4,
    }


def wrapped(wrapper: Any, model: nn.Module, scale_window: int = 1000, **cfg: Any) -> Any:
    """The optimizer as fairseq's trainer builds it for *model*, which is in fp16 or bf16."""
    fp16 = next(model.parameters()).dtype == torch.float16
    everything = OmegaConf.create({"common": common(fp16, scale_window), "optimizer": {**CFG, **cfg}})
    return wrapper.build_optimizer(everything, list(model.parameters()))


def gradients(model: nn.Module, step: int, scale: float = 1.0) -> list[Tensor]:
    """Random ones, of several magnitudes."""
    generator = torch.Generator().manual_seed(step)
    return [
        (scale * 10.0 ** -(i % 4) * torch.randn(param.shape, generator=generator)).to(param)
        for i, param in enumerate(model.parameters())
    ]


def give(model: nn.Module, grads: list[Tensor]) -> None:
    for param, grad in zip(model.parameters(), grads, strict=True):
        param.grad = grad.clone() if param.grad is None else param.grad.add_(grad)


def update(optimizer: Any, model: nn.Module, step: int, max_norm: float = 0.0, scale: float = 1.0) -> Tensor:
    """What fairseq's trainer does in an update; the norm."""
    optimizer.zero_grad()
    give(model, gradients(model, step, scale))
    optimizer._needs_sync = True  # as after a backward: FP16Optimizer looks at it
    optimizer.all_reduce_grads(model)
    optimizer.multiply_grads(0.3)
    norm = optimizer.clip_grad_norm(max_norm)
    optimizer.set_lr(0.01 / (1 + step % 7))
    optimizer.step()
    return norm


def assert_same_parameters(first: nn.Module, second: nn.Module) -> None:
    for name, param in first.named_parameters():
        assert param.equal(second.get_parameter(name)), name


# The formula


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("weight_decay", [0.0, 0.1])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fifty_updates_equal_fairseqs_adam(
    dtype: torch.dtype, plain: bool, weight_decay: float, max_norm: float
) -> None:
    model, expected = network(dtype), network(dtype)
    optimizer = build(model, weight_decay=weight_decay, sf_plain=plain)
    adam = Adam(expected.parameters(), 0.01, BETAS, eps=1e-3, weight_decay=weight_decay)
    rtol = 1e-12 if dtype == torch.float64 else 3e-6
    for step in range(50):
        norm = update(optimizer, model, step, max_norm)
        give(expected, [0.3 * grad for grad in gradients(expected, step)])
        raw = nn.utils.clip_grad_norm_(
            expected.parameters(), max_norm or math.inf
        )  # as fairseq's, also in fp64
        torch.testing.assert_close(norm, raw.float().cpu(), rtol=1e-6, atol=0)
        adam.param_groups[0]["lr"] = 0.01 / (1 + step % 7)
        adam.step()
        adam.zero_grad()
        for param, reference in zip(model.parameters(), expected.parameters(), strict=True):
            torch.testing.assert_close(param, reference, rtol=rtol, atol=rtol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
def test_parameters_frozen_later_stay_as_they_are(dtype: torch.dtype, plain: bool) -> None:
    """Adam's moments still moved them."""
    model = network(dtype)
    optimizer = build(model, sf_plain=plain)
    for step in range(6):
        if step == 2:
            model[0].requires_grad_(False)
            before = [param.clone() for param in model.parameters()]
            state = optimizer.state_dict()["state"]
            moments = {name: value.clone() for name, value in state[0].items() if name != "step"}
        optimizer.zero_grad()
        for param, grad in zip(model.parameters(), gradients(model, step), strict=True):
            if param.requires_grad:
                param.grad.add_(grad)
        optimizer.step()
    moved = [not param.equal(old) for param, old in zip(model.parameters(), before, strict=True)]
    assert moved == [False, False] + [True] * (len(before) - 2)
    after = optimizer.state_dict()["state"][0]
    assert all(after[name].equal(value) for name, value in moments.items())


def test_padding_of_the_flat_buffer_stays_zero() -> None:
    model = network()
    optimizer = build(model)
    for step in range(3):
        update(optimizer, model, step)
    flat = optimizer.flat
    free = torch.ones_like(flat.data, dtype=torch.bool)
    for param in model.parameters():
        flat.view(param, free).zero_()
    assert free.any() and not flat.data[free].any() and not flat.grad[free].any()


def test_gradient_factors_may_be_tensors() -> None:
    models = [network(), network()]
    for model, kind in zip(models, (float, torch.tensor), strict=True):
        optimizer = build(model)
        give(model, gradients(model, 0))
        optimizer.multiply_grads(kind(0.25))
        optimizer.multiply_grads(kind(3.0))
        assert optimizer.clip_grad_norm(0.1).dtype == torch.float32
        optimizer.step(scale=kind(2.0))
    assert_same_parameters(*models)


def test_a_gradient_factor_applies_to_one_step() -> None:
    model = network()
    optimizer = build(model)
    give(model, gradients(model, 0))
    raw = optimizer.clip_grad_norm(0)
    optimizer.multiply_grads(0.25)
    assert optimizer.clip_grad_norm(0) == raw / 4
    optimizer.zero_grad()
    give(model, gradients(model, 0))
    assert optimizer.clip_grad_norm(0) == raw
    optimizer.multiply_grads(0.25)
    optimizer.step()
    give(model, gradients(model, 1))
    optimizer.flat.grad.fill_(1)
    assert optimizer.clip_grad_norm(0) == optimizer.flat.grad_norm()


def test_a_closure_is_evaluated_with_gradients() -> None:
    model = network()
    optimizer = build(model)

    def loss() -> Tensor:
        value = model(torch.ones(2, 5, device=DEVICE)).square().sum()
        value.backward()
        return value

    before = model[0].weight.detach().clone()
    optimizer.step(loss)
    assert not model[0].weight.equal(before)


def test_attributes_that_fairseq_reads() -> None:
    model = network()
    optimizer = build(model, lr=[0.03])
    assert list(map(id, optimizer.params)) == list(map(id, model.parameters()))
    assert optimizer.get_lr() == 0.03
    assert optimizer.supports_memory_efficient_fp16 and optimizer.supports_flat_params
    assert not optimizer.supports_groups and not optimizer.supports_step_with_scale
    assert flat_of(model) is optimizer.flat
    assert build(model).flat is optimizer.flat  # fairseq builds it twice on a resume
    assert optimizer.clip_grad_norm(0).device.type == "cpu"


@pytest.mark.parametrize(
    "given, taken", [("(0.9, 0.98)", BETAS), ("[0.8,0]", (0.8, 0.0)), ([0.9, 0.98], BETAS)], ids=str
)
def test_betas_are_read_from_a_string_or_a_list(given: Any, taken: tuple[float, float]) -> None:
    assert build(network(), adam_betas=given).param_groups[0]["betas"] == taken


@pytest.mark.parametrize("given", ["0.9", "(0.9, 1)", "(0.9,)", "best", "(0.9", None], ids=str)
def test_invalid_betas_are_refused(given: Any) -> None:
    with pytest.raises(SurfaceFusionError, match=r"--adam-betas .*: give two numbers in \[0, 1\)"):
        build(network(), adam_betas=given)


# fp16 and bf16


@pytest.mark.parametrize("max_norm", [0.0, 0.5])
@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
@pytest.mark.parametrize("wrapper", [MemoryEfficientFP16Optimizer, FP16Optimizer])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_equals_adam_on_fp32_weights(
    dtype: torch.dtype, wrapper: Any, plain: bool, max_norm: float
) -> None:
    """Also that the loss scale, which grows every five updates here, is divided out."""
    model, master = network(dtype), network(dtype).float()
    optimizer = wrapped(wrapper, model, scale_window=5, sf_plain=plain)
    adam = Adam(master.parameters(), 0.01, BETAS, eps=1e-3, weight_decay=0.1)
    for step in range(20):
        scale = 1.0 if optimizer.scaler is None else optimizer.scaler.loss_scale
        norm = update(optimizer, model, step, max_norm, scale)
        exact = [0.3 / scale * grad.float() for grad in gradients(model, step, scale)]
        give(master, exact)
        expected = utils.clip_grad_norm_(master.parameters(), max_norm)
        torch.testing.assert_close(norm.cpu(), expected.cpu(), rtol=2e-6, atol=0)
        adam.param_groups[0]["lr"] = 0.01 / (1 + step % 7)
        adam.step()
        adam.zero_grad()
        state = optimizer.state_dict()["state"]
        for i, (param, exactly) in enumerate(zip(model.parameters(), master.parameters(), strict=True)):
            if wrapper is MemoryEfficientFP16Optimizer:
                torch.testing.assert_close(state[i]["master"], exactly.detach(), rtol=1e-5, atol=1e-6)
                assert param.equal(state[i]["master"].to(dtype))
            rounding = torch.finfo(dtype).eps
            torch.testing.assert_close(param.float(), exactly, rtol=rounding, atol=1e-5)
    assert dtype == torch.bfloat16 or optimizer.scaler.loss_scale == 128 * 2**4


def test_small_half_precision_gradients_are_not_rounded_to_zero() -> None:
    """A gradient times its factor may be smaller than the smallest fp16 number."""
    model = network(torch.float16)
    optimizer = build(model, adam_eps=1e-12, weight_decay=0.0)
    before = model[0].weight.detach().clone()
    optimizer.zero_grad()
    model[0].weight.grad.fill_(1e-4)  # type: ignore[union-attr]
    optimizer.step(scale=1e5)
    torch.testing.assert_close(before - model[0].weight, torch.full_like(before, 0.01), rtol=0, atol=3e-4)


@pytest.mark.parametrize("wrapper", [MemoryEfficientFP16Optimizer, FP16Optimizer])
@pytest.mark.parametrize("bad", [torch.inf, torch.nan])
def test_an_update_is_skipped_on_overflow(wrapper: Any, bad: float) -> None:
    models = [network(torch.float16), network(torch.float16)]
    optimizers = [wrapped(wrapper, model) for model in models]
    for optimizer in optimizers:
        optimizer.scaler.loss_scale = 64
    before = [param.detach().clone() for param in models[0].parameters()]
    optimizers[0].scaler.loss_scale = 128
    optimizers[0].zero_grad()
    give(models[0], gradients(models[0], 0))
    models[0][2].weight.grad[3, 3] = bad
    optimizers[0]._needs_sync = True
    with pytest.raises(OverflowError, match="setting loss scale to: 64"):
        optimizers[0].clip_grad_norm(0.5)
    assert all(param.equal(old) for param, old in zip(models[0].parameters(), before, strict=True))
    for optimizer, model in zip(optimizers, models, strict=True):
        update(optimizer, model, 1, 0.5)
    assert_same_parameters(*models)


def test_a_checkpoint_loaded_before_the_first_step_is_trained_further() -> None:
    model = network(torch.float16)
    optimizer = wrapped(MemoryEfficientFP16Optimizer, model)
    with torch.no_grad():
        for param in model.parameters():
            param.fill_(3)
    update(optimizer, model, 0)
    for param in model.parameters():
        assert (param - 3).abs().max() < 0.02


# State


def stored(state: dict[str, Any]) -> dict[str, Any]:
    """*state* after fairseq's saving and loading of a checkpoint."""
    file = io.BytesIO()
    torch.save(utils.move_to_cpu(state), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


@pytest.mark.parametrize("plain", [True, False], ids=["plain", "fast"])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_a_resume_in_another_layout_equals_the_uninterrupted_run_bit_for_bit(
    dtype: torch.dtype, plain: bool
) -> None:
    def start(**kwargs: Any) -> tuple[nn.Module, Any]:
        model = network(dtype, **kwargs)
        if dtype in (torch.float16, torch.bfloat16):
            return model, wrapped(MemoryEfficientFP16Optimizer, model, sf_plain=plain)
        return model, build(model, sf_plain=plain)

    model, optimizer = start()
    for step in range(3):
        update(optimizer, model, step)
    weights, state = stored({"model": model.state_dict(), "state": optimizer.state_dict()}).values()
    resumed, second = start(grouped=True)
    resumed.load_state_dict(weights)
    second.load_state_dict(state)
    for step in range(3, 6):
        update(optimizer, model, step, 0.5)
        update(second, resumed, step, 0.5)
        assert_same_parameters(model, resumed)
    ours, theirs = optimizer.state_dict()["state"], second.state_dict()["state"]
    names = {"exp_avg", "exp_avg_sq", "step"} | ({"master"} if dtype.itemsize == 2 else set())
    for i, param in enumerate(model.parameters()):
        assert ours[i].keys() == theirs[i].keys() == names and ours[i]["step"] == 6
        for name in names - {"step"}:
            assert ours[i][name].equal(theirs[i][name]) and ours[i][name].shape == param.shape


def test_state_dict_before_the_first_step_is_empty() -> None:
    optimizer = build(network())
    state = stored(optimizer.state_dict())
    assert state["state"] == {} and state["param_groups"][0]["params"] == list(range(6))
    model = network()
    resumed = build(model)
    update(resumed, model, 0)
    resumed.load_state_dict(state)
    assert resumed.state_dict()["state"] == {}


def test_hyperparameters_come_from_the_checkpoint_unless_overridden() -> None:
    state = stored(build(network(), adam_eps=1e-5, lr=[0.5]).state_dict())
    optimizer = build(network())
    optimizer.load_state_dict(state, {"lr": 0.25})
    group = optimizer.param_groups[0]
    assert (group["lr"], group["eps"], group["betas"]) == (0.25, 1e-5, BETAS)
    assert optimizer.get_lr() == 0.25 and len(group["params"]) == 6


def test_the_state_of_fairseqs_adam_is_loaded() -> None:
    model, expected = network(), network()
    adam = Adam(expected.parameters(), 0.01, BETAS, eps=1e-3, weight_decay=0.1)
    give(expected, gradients(expected, 0))
    adam.step()
    model.load_state_dict(expected.state_dict())
    optimizer = build(model)
    optimizer.load_state_dict(stored(adam.state_dict()))
    for grads_of, take in ((model, optimizer.step), (expected, adam.step)):
        grads_of.zero_grad()
        give(grads_of, gradients(grads_of, 1))
        take()
    for param, reference in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(param, reference, rtol=1e-6, atol=1e-7)


def other_states() -> dict[str, dict[str, Any]]:
    fewer = network()[:1]
    wider = nn.Sequential(nn.Linear(5, 8), nn.Linear(7, 7), nn.LayerNorm(7))
    states = {}
    for name, model in (("fewer", fewer), ("wider", wider)):
        optimizer = build(model)
        update(optimizer, model, 0)
        states[name] = optimizer.state_dict()
    model = network()
    optimizer = build(model)
    update(optimizer, model, 0)
    states["uneven"] = stored(optimizer.state_dict())
    states["uneven"]["state"][2]["step"] = 5
    states["partial"] = stored(optimizer.state_dict())
    del states["partial"]["state"][4]
    return states


@pytest.mark.parametrize("kind", ["fewer", "wider", "uneven", "partial"])
def test_the_state_of_another_training_is_refused(kind: str) -> None:
    state = other_states()[kind]
    with pytest.raises(SurfaceFusionError, match=r"parameter group.* add --reset-optimizer"):
        build(network()).load_state_dict(state)


# Several processes


def test_only_local_gradients_are_averaged_by_the_optimizer(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over fairseq's data-parallel group; see also packed/test_flat_parameters.py."""
    model = network()
    optimizer = build(model)
    averaged_by: list[str] = []
    module = Namespace(all_reduce_grads=lambda: averaged_by.append("wrapper"))
    monkeypatch.setattr(optimizer.flat, "average_grads", averaged_by.append)
    monkeypatch.setattr("surface_fusion.optim.flat_adam.get_data_parallel_group", lambda: "group")
    for initialised, needs_average in ((False, True), (True, False), (True, True)):
        monkeypatch.setattr(torch.distributed, "is_initialized", lambda value=initialised: value)
        optimizer.flat.needs_average = needs_average
        optimizer.all_reduce_grads(module)
    assert averaged_by == ["wrapper", "wrapper", "group"]
    optimizer.zero_grad()
    assert not optimizer.flat.needs_average


# A training


def losses(data: Path, *flags: object, updates: int = 20) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a training by fairseq's trainer."""
    argv = [data, *TRAIN, "--dropout", 0, "--attention-dropout", 0, "--user-dir", USER_DIR, *flags]
    args = options.parse_args_and_arch(options.get_training_parser(), list(map(str, argv)))
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    task.load_dataset("train")
    torch.manual_seed(1)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    seen: list[float] = []
    norms: list[float] = []
    train_step, clip = task.train_step, trainer.clip_grad_norm

    def watched_step(*args: Any, **kwargs: Any) -> Any:
        result = train_step(*args, **kwargs)
        seen.append(result[0].item())
        return result

    def watched_clip(max_norm: float) -> Tensor:
        norms.append(norm := clip(max_norm))
        return norm

    task.train_step, trainer.clip_grad_norm = watched_step, watched_clip
    for epoch in range(1, 99):
        iterator = trainer.get_train_iterator(epoch)
        for sample in iterator.next_epoch_itr():
            trainer.train_step([sample])
            if len(seen) == updates:
                return seen, list(map(float, norms))
    raise AssertionError


@pytest.mark.slow
@pytest.mark.parametrize(
    "clip",
    [
        0.0,
        pytest.param(
            1.0, marks=pytest.mark.skipif(DEVICE == "cuda", reason="fairseq clips with a CUDA factor")
        ),
    ],
)
def test_losses_of_a_training_equal_those_of_adam(data: Path, clip: float) -> None:
    more = ("--clip-norm", clip, "--adam-betas", "(0.9, 0.98)", "--weight-decay", 0.01)
    expected, expected_norms = losses(data, *more)
    for flags in ((), ("--sf-plain",)):
        got, norms = losses(data, "--optimizer", "flat_adam", *flags, *more)
        assert got == pytest.approx(expected, rel=1e-6)
        assert norms == pytest.approx(expected_norms, rel=1e-4)
    assert expected[-1] < 0.8 * expected[0]


@pytest.mark.slow
def test_a_resumed_training_equals_the_uninterrupted_one(data: Path, tmp_path: Path) -> None:
    argv = [
        "train",
        data,
        *TRAIN,
        "--optimizer",
        "flat_adam",
        "--disable-validation",
        "--no-epoch-checkpoints",
    ]

    def train(folder: str, updates: int) -> dict[str, Any]:
        more = ("--save-dir", tmp_path / folder, "--max-update", updates)
        assert main(list(map(str, (*argv, *more)))) == 0
        return checkpoint_utils.load_checkpoint_to_cpu(str(tmp_path / folder / "checkpoint_last.pt"))

    whole = train("whole", 10)
    assert train("parts", 4)["optimizer_history"][-1]["num_updates"] == 4
    parts = train("parts", 10)
    assert parts["optimizer_history"][-1]["optimizer_name"] == "FlatAdam"
    assert whole["last_optimizer_state"]["state"][0]["step"] == 10
    for name, value in whole["model"].items():
        assert value.equal(parts["model"][name]), name
    for number, state in whole["last_optimizer_state"]["state"].items():
        for name in ("exp_avg", "exp_avg_sq"):
            assert state[name].equal(parts["last_optimizer_state"]["state"][number][name])


def test_the_error_for_the_state_of_another_model_names_the_flag(data: Path, tmp_path: Path) -> None:
    """Also where the model itself loads."""
    argv = ["train", data, *TRAIN, "--optimizer", "flat_adam", "--disable-validation", "--save-dir", tmp_path]
    assert main(list(map(str, (*argv, "--max-update", 1)))) == 0
    path = tmp_path / "checkpoint_last.pt"
    state = torch.load(path, weights_only=False)
    state["last_optimizer_state"]["state"][0]["exp_avg"] = torch.zeros(2, 2)
    torch.save(state, path)
    args = options.parse_args_and_arch(
        options.get_training_parser(), list(map(str, (*argv[1:], "--user-dir", USER_DIR)))
    )
    cfg = convert_namespace_to_omegaconf(args)
    task = tasks.setup_task(cfg.task)
    trainer = Trainer(cfg, task, task.build_model(cfg.model), task.build_criterion(cfg.criterion))
    with pytest.raises(SurfaceFusionError, match=r"does not match the parameters of .*; add --reset-opt"):
        trainer.load_checkpoint(str(path))


# On a GPU

needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_updates_on_a_gpu_equal_those_on_a_cpu(dtype: torch.dtype) -> None:
    models = [network(dtype).cpu(), network(dtype).cuda()]
    for model in models:
        half = dtype != torch.float32
        optimizer = wrapped(MemoryEfficientFP16Optimizer, model) if half else build(model)
        for step in range(10):
            norm = update(optimizer, model, step, 0.5)
            assert norm.device.type == "cpu" and norm.dtype == torch.float32
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(first, second.cpu(), rtol=torch.finfo(dtype).eps, atol=1e-5)


@needs_gpu
def test_only_the_norm_synchronises_with_the_gpu() -> None:
    model = network(torch.float16).cuda()
    optimizer = wrapped(MemoryEfficientFP16Optimizer, model)
    grads = gradients(model, 0)
    for _ in range(2):  # the first allocates
        torch.cuda.set_sync_debug_mode("error")
        try:
            optimizer.zero_grad()
            give(model, grads)
            optimizer.multiply_grads(0.3)
            torch.cuda.set_sync_debug_mode("default")
            optimizer.clip_grad_norm(0.5)
            torch.cuda.set_sync_debug_mode("error")
            optimizer.step()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    assert all(parameter.isfinite().all() for parameter in model.parameters())


@needs_gpu
def test_fairseqs_fp16_optimizer_with_one_flat_parameter() -> None:
    models = [network(torch.float16).cuda(), network(torch.float16).cuda()]
    optimizers = [wrapped(MemoryEfficientFP16Optimizer, models[0])]
    cfg = OmegaConf.create({"common": common(True), "optimizer": CFG})
    cfg.common.fp16_no_flatten_grads = False
    optimizers.append(FP16Optimizer.build_optimizer(cfg, list(models[1].parameters())))
    for step in range(10):
        for optimizer, model in zip(optimizers, models, strict=True):
            update(optimizer, model, step, 0.5, 128)
    for first, second in zip(*(model.parameters() for model in models), strict=True):
        torch.testing.assert_close(first, second, rtol=1e-3, atol=1e-5)
