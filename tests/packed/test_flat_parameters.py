"""Parameters as views of one flat tensor: layout, gradients, and conversions that are refused.

Also tests ``packed/gradient_reduction.py``.
"""

import copy
import gc
import pickle
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel as ddp

from surface_fusion import SurfaceFusionError
from surface_fusion.packed.flat_parameters import ALIGNMENT, FlatParameters, flat_of
from tests.helpers import warm_processes


class Attention(nn.Module):
    """Three projections, the value's before the key's, to be laid out as one; and other parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(5, 3)
        self.v, self.k, self.q = (nn.Linear(5, 7) for _ in range(3))
        self.scale = nn.Parameter(torch.tensor(2.0))
        for rank, name in enumerate("qkv"):
            for kind in ("weight", "bias"):
                getattr(getattr(self, name), kind).flat_group = (("qkv", kind), rank)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(self.scale * (self.q(x) * self.k(x) + self.v(x)) @ self.q.weight)


@pytest.fixture
def model() -> Attention:
    torch.manual_seed(0)
    return Attention()


def gaps(flat: FlatParameters) -> Tensor:
    """Which elements belong to no parameter."""
    free = torch.ones_like(flat.data, dtype=torch.bool)
    for param, start in flat.offsets.items():
        free[start : start + param.numel()] = False
    return free


def backward(model: nn.Module, seed: int = 0) -> None:
    x = torch.randn(4, 5, generator=torch.Generator().manual_seed(seed))
    model(x.to(next(model.parameters()))).square().sum().backward()


# Layout


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.float64])
def test_parameters_keep_their_values_and_become_views(model: Attention, dtype: torch.dtype) -> None:
    model.to(dtype)
    before = {name: param.detach().clone() for name, param in model.named_parameters()}
    flat = FlatParameters.of(model.parameters())
    assert flat.data.dtype == flat.grad.dtype == dtype and flat.data.dim() == 1
    for name, param in model.named_parameters():
        assert param.equal(before[name]) and param.is_contiguous() and param.requires_grad
        assert param.grad is not None and param.grad.shape == param.shape
        start = flat.data.data_ptr() + flat.offsets[param] * dtype.itemsize
        assert param.data_ptr() == start
        assert param.grad.data_ptr() - flat.grad.data_ptr() == start - flat.data.data_ptr()
    assert list(map(id, flat.offsets)) == list(map(id, model.parameters()))
    free = gaps(flat)
    assert free.any() and not flat.data[free].any() and not flat.grad.any()


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_only_members_of_a_group_start_between_multiples_of_128_bytes(
    model: Attention, dtype: torch.dtype
) -> None:
    flat = FlatParameters.of(model.to(dtype).parameters())
    for name, param in model.named_parameters():
        inside = name.startswith(("k.", "v."))  # after q
        assert (flat.offsets[param] * dtype.itemsize % ALIGNMENT == 0) != inside, name


def test_a_group_is_one_matrix_by_rank_at_its_first_members_place(model: Attention) -> None:
    flat = FlatParameters.of(model.parameters())
    backward(model)
    for kind in ("weight", "bias"):
        members = [getattr(getattr(model, name), kind) for name in "qkv"]
        data, grad = flat.group_view(("qkv", kind))
        assert data.equal(torch.cat(members)) and grad.equal(torch.cat([p.grad for p in members]))
        assert data.data_ptr() == model.get_parameter(f"q.{kind}").data_ptr()
    starts = [flat.offsets[p] for p in (model.first.bias, model.q.weight, model.q.bias, model.scale)]
    assert starts[0] < starts[1] < starts[2] and starts[3] < starts[0]
    with pytest.raises(KeyError):
        flat.group_view("qkv")


def test_shared_parameters_once_and_frozen_ones_not(model: Attention) -> None:
    model.k.weight = model.q.weight
    model.first.requires_grad_(False)
    trainable = [param for param in model.parameters() if param.requires_grad]
    flat = FlatParameters.of([*trainable, model.q.weight])
    assert len(flat.offsets) == len(trainable) == 6
    assert flat_of(model) is flat


def test_a_view_of_any_flat_tensor(model: Attention) -> None:
    flat = FlatParameters.of(model.parameters())
    indices = torch.arange(flat.data.numel())
    view = flat.view(model.first.weight, indices)
    assert view.shape == (3, 5) and view[0, 0] == flat.offsets[model.first.weight]
    assert flat.view(model.scale).equal(model.scale)


def test_a_checkpoint_is_loaded_into_the_views(model: Attention) -> None:
    flat = FlatParameters.of(model.parameters())
    model.load_state_dict({name: torch.full_like(p, 3) for name, p in model.state_dict().items()})
    free = gaps(flat)
    assert flat.data[~free].eq(3).all() and not flat.data[free].any()


# Which flat parameters a model has


def test_making_parameters_flat_twice_gives_the_same_object(model: Attention) -> None:
    flat = FlatParameters.of(model.parameters())
    assert FlatParameters.of(list(model.parameters())) is flat
    assert flat_of(model) is flat and flat_of(model.q) is flat
    fewer = FlatParameters.of(model.q.parameters())
    assert fewer is not flat and flat_of(model.q) is fewer and flat_of(model) is None


def test_flat_parameters_of_a_model_that_has_none(model: Attention) -> None:
    assert flat_of(model) is None and flat_of(nn.ReLU()) is None
    flat = FlatParameters.of(model.q.parameters())
    assert flat_of(model) is None
    address = model.q.weight.data_ptr()
    del flat
    gc.collect()
    assert flat_of(model.q) is None
    assert FlatParameters.of(model.q.parameters()).view(model.q.weight).data_ptr() != address


def test_a_model_whose_dtype_changed_is_made_flat_again(model: Attention) -> None:
    flat = FlatParameters.of(model.parameters())
    model.double()
    assert flat_of(model) is None
    new = FlatParameters.of(model.parameters())
    assert new is not flat and new.data.dtype == torch.float64 and flat_of(model) is new


@pytest.mark.parametrize("copied", [copy.deepcopy, lambda model: pickle.loads(pickle.dumps(model))])
def test_a_copy_of_a_model_is_not_flat(model: Attention, copied) -> None:
    flat = FlatParameters.of(model.parameters())
    copy_ = copied(model)
    assert flat_of(copy_) is None and flat_of(model) is flat
    assert copy_.q.weight.equal(model.q.weight) and FlatParameters.of(copy_.parameters()) is not flat


def test_parameters_of_two_kinds_are_refused(model: Attention) -> None:
    model.first.half()
    with pytest.raises(SurfaceFusionError, match=r"2 of .*float16 on cpu, 7 of .*float32 on cpu"):
        FlatParameters.of(sorted(model.parameters(), key=lambda p: p.dtype != torch.float16))
    with pytest.raises(SurfaceFusionError, match=r"found none"):
        FlatParameters.of([])


def test_a_group_of_other_widths_is_refused(model: Attention) -> None:
    model.first.flat_group = None
    model.q.bias.flat_group = (("qkv", "weight"), 3)  # type: ignore[attr-defined]
    with pytest.raises(SurfaceFusionError, match=r"cannot be stacked"):
        FlatParameters.of(model.parameters())


# Gradients


@pytest.mark.parametrize("set_to_none", [False, True])
def test_backward_accumulates_into_the_flat_gradient(model: Attention, set_to_none: bool) -> None:
    expected = Attention()
    expected.load_state_dict(model.state_dict())
    flat = FlatParameters.of(model.parameters())
    for seed in (1, 2):
        model.zero_grad(set_to_none)
        expected.zero_grad()
        for i in range(2):
            backward(model, seed + i)
            backward(expected, seed + i)
        flat.attach_grads()
        for param, reference in zip(model.parameters(), expected.parameters(), strict=True):
            assert flat.view(param, flat.grad).equal(reference.grad) and param.grad.equal(reference.grad)
            assert param.grad.data_ptr() == flat.view(param, flat.grad).data_ptr()
    assert not flat.grad[gaps(flat)].any()


def test_missing_and_replaced_gradients_are_collected(model: Attention) -> None:
    flat = FlatParameters.of(model.parameters())
    flat.grad[~gaps(flat)] = 1
    model.q.weight.grad = None
    model.q.bias.grad = torch.full((7,), 5.0)
    flat.attach_grads()
    assert not flat.view(model.q.weight, flat.grad).any() and model.q.weight.grad is not None
    assert flat.view(model.q.bias, flat.grad).eq(5).all() and model.k.bias.grad.eq(1).all()


def test_zero_grad(model: Attention) -> None:
    flat = FlatParameters.of(model.parameters())
    backward(model)
    flat.needs_average = True
    model.q.weight.grad = None
    model.q.bias.grad = torch.full((7,), 5.0)
    flat.zero_grad()
    assert not flat.grad.any() and not flat.needs_average
    for param in model.parameters():
        assert param.grad is not None and not param.grad.any()


@pytest.mark.parametrize("replaced", [False, True])
def test_zero_grad_after_a_fast_step(model: Attention, replaced: bool) -> None:
    """launch_norm notes whether every ``.grad`` is in place."""
    flat = FlatParameters.of(model.parameters())
    for _ in range(2):
        flat.grad.fill_(3.0)
        if replaced:
            model.q.weight.grad = torch.full_like(model.q.weight, 5.0)
        flat.launch_norm()
        flat.zero_grad()
        assert not any(param.grad.any() for param in model.parameters())
        model.q.weight.grad = None  # after launch_norm: restored one update later
        flat.launch_norm()
        flat.zero_grad()
        assert model.q.weight.grad is not None


def test_gradients_from_before_the_conversion_are_kept(model: Attention) -> None:
    backward(model)
    before = [param.grad.clone() for param in model.parameters()]
    FlatParameters.of(model.parameters())
    assert all(p.grad.equal(g) for p, g in zip(model.parameters(), before, strict=True))


@pytest.mark.parametrize("convert", [nn.Module.half, nn.Module.double])
def test_a_model_converted_afterwards_is_refused(model: Attention, convert) -> None:
    flat = FlatParameters.of(model.parameters())
    convert(model)
    for use in (flat.attach_grads, flat.zero_grad):
        with pytest.raises(RuntimeError, match=r"convert the model .* before its optimizer is built"):
            use()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32, torch.float64])
def test_gradient_norm(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    flat = FlatParameters.of([nn.Parameter(torch.zeros(1000, 999, dtype=dtype))])
    flat.grad[: 1000 * 999] = 100 * torch.randn(1000 * 999)  # squares are beyond fp16
    expected = flat.grad.double().norm()
    tolerance = 1e-12 if dtype == torch.float64 else 3e-7
    torch.testing.assert_close(flat.grad_norm().double(), expected, rtol=tolerance, atol=0)
    flat.grad[5] = torch.inf
    assert flat.grad_norm().isinf()
    flat.grad[7] = torch.nan
    assert flat.grad_norm().isnan()


# Several processes


def two_process_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    for case in ("averaged", "launched", "wrapped", "buckets"):
        torch.manual_seed(0)
        model = Attention()
        own = case not in ("wrapped", "buckets")
        wrapper = model if own else ddp(model, gradient_as_bucket_view=case == "buckets")
        flat = FlatParameters.of(model.parameters())  # fairseq wraps before it builds the optimizer
        for step in range(2):
            flat.zero_grad()
            backward(wrapper, seed=2 * step + rank)
        if own:
            model.q.weight.grad = model.q.weight.grad.clone()  # not in the buffer
            flat.needs_average = True
            if case == "launched":
                flat.launch_average(None)
            flat.average_grads(None)
            assert not flat.needs_average
        flat.attach_grads()
        torch.save([flat.view(p, flat.grad).clone() for p in flat.offsets], f"{folder}/{case}{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_two_processes_on_their_own_and_under_distributed_data_parallel(
    tmp_path: Path, model: Attention
) -> None:
    warm_processes.in_two(two_process_worker, str(tmp_path))
    parts = []
    for rank in range(2):
        model.zero_grad()
        backward(model, seed=2 + rank)
        parts.append([param.grad.clone() for param in model.parameters()])
    for file in tmp_path.glob("*.pt"):
        for first, second, mean in zip(*parts, torch.load(file), strict=True):
            torch.testing.assert_close(mean, (first + second) / 2)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_flat_parameters_on_a_gpu(model: Attention) -> None:
    expected = Attention().cuda().half()
    expected.load_state_dict(model.state_dict())
    flat = FlatParameters.of(model.cuda().half().parameters())
    assert flat.grad.is_cuda and flat.data.data_ptr() % ALIGNMENT == 0
    backward(model)
    backward(expected)
    for param, reference in zip(model.parameters(), expected.parameters(), strict=True):
        assert flat.view(param, flat.grad).equal(reference.grad)
    norm = torch.cat([p.grad.flatten() for p in expected.parameters()]).double().norm()
    torch.testing.assert_close(flat.grad_norm().double(), norm, rtol=1e-6, atol=0)
    flat.launch_norm()
    assert not flat.norm_on_host().is_cuda and flat.norm_on_host() == flat.grad_norm().cpu()
    flat.needs_average = True  # nothing changes the gradient after launch_norm
    copied = flat.norm_on_host()
    assert copied == flat.grad_norm().cpu()
    flat.zero_grad()
    assert flat.norm_on_host() == 0 != copied
