"""Each method equals a few plain lines from its equation, in float64: values, gradients, and its size.

Tests ``encoder_fusion/average.py``, ``encoder_fusion/base.py``, ``encoder_fusion/concat.py``,
``encoder_fusion/dense.py``, ``encoder_fusion/dlcl.py``, ``encoder_fusion/dwatt.py``,
``encoder_fusion/extra_layers.py``, ``encoder_fusion/fine_grained.py``, ``encoder_fusion/layer_attention.py``,
``encoder_fusion/layer_combination.py``, ``encoder_fusion/lstm.py``, ``encoder_fusion/representation.py``,
``encoder_fusion/routing.py`` and ``encoder_fusion/transparent.py``.
"""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from surface_fusion.encoder_fusion import Combination, EncoderFusion, LayerAttention, methods
from surface_fusion.encoder_fusion.routing import squash

DIM, LAYERS, DECODER_LAYERS, FFN = 8, 3, 2, 12
SHAPE = (5, 2, DIM)
DEFAULTS: dict[str, dict[str, Any]] = {
    "routing": {"capsules": 4},
    **{name: {"dropout": 0.0} for name in methods(LayerAttention)},
}


def make(name: str, states: int = LAYERS, dim: int = DIM, **options: Any) -> Any:
    """A method that is not inside the stacks."""
    method: Any = methods()[name]
    layers = (DECODER_LAYERS,) if issubclass(method, LayerAttention) else ()
    return method(states, dim, *layers, **{**DEFAULTS.get(name, {}), **options})


def make_combination(
    name: str, before: bool, layers: int = LAYERS, dim: int = DIM, embedding: bool = True
) -> Any:
    method: Any = methods(Combination)[name]
    return method(layers, dim, before, embedding)


def shaken(module: nn.Module) -> Any:
    """In float64, no parameter where it began."""
    generator = torch.Generator().manual_seed(1)
    module.double()
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    return module


def states(count: int = LAYERS) -> list[Tensor]:
    generator = torch.Generator().manual_seed(2)
    return [torch.randn(SHAPE, generator=generator, dtype=torch.float64) for _ in range(count)]


def norm(module: Any, x: Tensor) -> Tensor:
    centred = x - x.mean(-1, keepdim=True)
    return (
        centred / (centred.square().mean(-1, keepdim=True) + module.eps).sqrt() * module.weight + module.bias
    )


# The equations


def average(module: Any, z: Tensor) -> Tensor:
    return z.mean(0)


def concat(module: Any, z: Tensor) -> Tensor:
    side_by_side = torch.cat([*z], -1)
    return side_by_side @ torch.cat([*module.weight], 1).t()


def dwatt(module: Any, z: Tensor) -> Tensor:
    def f(block: Any, x: Tensor) -> Tensor:
        return norm(block.norm, F.gelu(x @ block.down.weight.t())) @ block.up.weight.t()

    keys = module.positions @ module.key.weight.t() + module.key.bias
    values = torch.stack([norm(n, f(b, x)) for n, b, x in zip(module.norms, module.values, z, strict=True)])
    query = 1 + F.elu(z[-1] + f(module.query, z[-1]))
    weights = torch.einsum("sbc,nc->sbn", query, keys).softmax(-1)
    return z[-1] + torch.einsum("sbn,nsbc->sbc", weights, values)


def representation(module: Any, z: Tensor) -> Tensor:
    hidden = (z @ module.hidden.weight.t() + module.hidden.bias).relu()
    return ((hidden @ module.weight.weight.t() + module.weight.bias) * z).sum(0)


def lstm(module: Any, z: Tensor) -> Tensor:
    whole = nn.LSTM(DIM, DIM).double()
    for kind in ("weight_ih", "weight_hh", "bias_ih", "bias_hh"):
        parameter = getattr(module.cell, kind)
        delattr(whole, f"{kind}_l0")
        setattr(whole, f"{kind}_l0", parameter)
    return whole(z.flatten(1, 2))[0][-1].view(SHAPE)


def routing(module: Any, z: Tensor) -> Tensor:
    votes = torch.einsum("nsbc,ndc->nsbd", z, module.votes).unflatten(-1, (4, DIM // 4))
    b = torch.zeros(votes.shape[:-1], dtype=z.dtype)
    for _ in range(3):
        total = (b.softmax(-1)[..., None] * votes).sum(0)
        length = total.norm(dim=-1, keepdim=True)
        out = length**2 / (1 + length**2) * total / length
        b = b + (out * votes).sum(-1)
    return out.flatten(-2)


def transparent(module: Any, z: Tensor) -> Tensor:
    weight = module.weight.softmax(1)
    return torch.cat([norm(module.layer_norm, torch.einsum("n,nsbc->sbc", w, z)) for w in weight], -1)


def fine_grained(module: Any, z: Tensor) -> Tensor:
    weight = module.weight.softmax(1)
    return torch.cat([norm(module.layer_norm, torch.einsum("nc,nsbc->sbc", w, z)) for w in weight], -1)


ORACLES = {
    "average": average,
    "concat": concat,
    "dwatt": dwatt,
    "representation": representation,
    "lstm": lstm,
    "routing": routing,
    "transparent": transparent,
    "fine-grained": fine_grained,
}


def test_every_method_has_an_equation() -> None:
    modules = {*methods(EncoderFusion), *methods(LayerAttention)} - {"extra-layers"}
    assert {*ORACLES} == modules == {*methods()} - {*methods(Combination), "extra-layers"}


@pytest.mark.parametrize("name", ORACLES)
def test_values_and_gradients_equal_the_equation(name: str) -> None:
    module = shaken(make(name))
    inputs = [x.requires_grad_() for x in states()]
    direction = states(1)[0].repeat(1, 1, 8)

    def results(out: Tensor) -> tuple[Tensor, ...]:
        leaves = [*inputs, *module.parameters()]
        return out, *torch.autograd.grad((out * direction[..., : out.shape[-1]]).sum(), leaves)

    found = results(module(inputs))
    expected = results(ORACLES[name](module, torch.stack(inputs)))
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


@pytest.mark.parametrize("name", ORACLES)
def test_gradcheck(name: str) -> None:
    module = shaken(make(name))
    inputs = [x[:2, :1].clone().requires_grad_() for x in states()]
    assert torch.autograd.gradcheck(lambda *z: module([*z]), inputs)


@pytest.mark.parametrize("name", ORACLES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision(name: str, dtype: torch.dtype) -> None:
    module = shaken(make(name)).to(dtype)
    inputs = [x.to(dtype) for x in states()]
    out = module(inputs)
    assert out.dtype == dtype
    expected = module.double()([x.double() for x in inputs])
    bound = 60 * torch.finfo(dtype).eps * expected.abs().max().item()
    torch.testing.assert_close(out.double(), expected, rtol=0, atol=bound)


@pytest.mark.parametrize("name", ORACLES)
def test_states_of_rows_and_of_batches_give_the_same_output(name: str) -> None:
    """The fast path has rows, the modules have S x B."""
    module = shaken(make(name))
    torch.testing.assert_close(module([x.flatten(0, 1) for x in states()]), module(states()).flatten(0, 1))


@pytest.mark.parametrize("name", ["concat", "dwatt"])
def test_start_as_plain_gives_the_output_of_the_plain_encoder(name: str) -> None:
    module: Any = make(name)
    module.start_as_plain()
    z = [x.float() for x in states()]
    torch.testing.assert_close(module(z), z[-1], rtol=0, atol=1e-6)
    module(z).square().sum().backward()
    assert any(p.grad is not None and p.grad.abs().sum() > 0 for p in module.parameters())


def test_dwatt_divides_by_the_width() -> None:
    plain, scaled = (make("dwatt", scaling=scaling) for scaling in (False, True))
    scaled.load_state_dict(plain.state_dict())
    last = states()[-1].float()
    logs = [module.weights(last).log() for module in (plain, scaled)]
    spread = [x - x[..., :1] for x in logs]
    torch.testing.assert_close(spread[1], spread[0] / DIM**0.5, rtol=1e-4, atol=1e-5)


def test_squash_at_zero() -> None:
    x = torch.zeros(2, 3, requires_grad=True)
    squash(x).sum().backward()
    assert squash(x).eq(0).all() and x.grad is not None and x.grad.isfinite().all()


def test_routing_with_one_iteration_is_an_average_of_votes() -> None:
    module = shaken(make("routing", iterations=1))
    z = torch.stack(states())
    total = torch.einsum("nsbc,ndc->sbd", z, module.votes) / 4
    torch.testing.assert_close(module([*z]), squash(total.unflatten(-1, (4, -1))).flatten(-2))


def test_the_embedding_has_a_layer_norm_of_its_own() -> None:
    module = shaken(make("transparent", LAYERS + 1, embedding=True, embedding_norm=True))
    z = states(LAYERS + 1)
    assert module.weight.shape == (DECODER_LAYERS, LAYERS + 1)
    expected = transparent(module, torch.stack([norm(module.embedding_norm, z[0]), *z[1:]]))
    torch.testing.assert_close(module(z), expected)


def test_a_feed_forward_layer_over_all_states() -> None:
    module = shaken(make("fine-grained", ffn_dim=FFN))
    z = torch.stack(states())
    hidden = (z @ module.fc1.weight.t() + module.fc1.bias).relu()
    z_ = norm(module.ffn_norm, z + hidden @ module.fc2.weight.t() + module.fc2.bias)
    torch.testing.assert_close(module([*z]), fine_grained(module, z_))


def test_a_pre_norm_encoder_has_the_norm_before_the_feed_forward_layer() -> None:
    module = shaken(make("fine-grained", ffn_dim=FFN, normalize_before=True))
    z = torch.stack(states())
    hidden = (norm(module.ffn_norm, z) @ module.fc1.weight.t() + module.fc1.bias).relu()
    z_ = z + hidden @ module.fc2.weight.t() + module.fc2.bias
    torch.testing.assert_close(module([*z]), fine_grained(module, z_))


def test_the_feed_forward_layer_over_all_states_drops_out_as_published() -> None:
    """Of its hidden units at the activations' rate, of its output at the model's; the residual stays."""
    module = shaken(make("fine-grained", ffn_dim=FFN, ffn_dropout=0.5, activation_dropout=0.25))
    z = torch.stack(states())
    module.train()
    torch.manual_seed(3)
    hidden = F.dropout((z @ module.fc1.weight.t() + module.fc1.bias).relu(), 0.25)
    out = F.dropout(hidden @ module.fc2.weight.t() + module.fc2.bias, 0.5)
    torch.manual_seed(3)
    torch.testing.assert_close(module._transform(z), norm(module.ffn_norm, z + out))


@pytest.mark.parametrize("dropconnect", [False, True])
def test_dropout_of_the_weights(dropconnect: bool) -> None:
    """Before the softmax they stay a distribution, after it they do not."""
    module: Any = make("fine-grained", dropout=0.5, dropconnect=dropconnect)
    torch.manual_seed(0)
    total = module.train().layer_weights().sum(1)
    assert total.sub(1).abs().max().item() < 1e-6 if dropconnect else total.sub(1).abs().max().item() > 0.1
    assert module.eval().layer_weights().sum(1).sub(1).abs().max().item() < 1e-6


# Inside the stacks


@pytest.mark.parametrize("embedding", [True, False], ids=["embedding", "without"])
@pytest.mark.parametrize("before", [False, True], ids=["post-norm", "pre-norm"])
def test_dlcl_equals_its_equation(before: bool, embedding: bool) -> None:
    module: Any = shaken(make_combination("dlcl", before, embedding=embedding))
    assert len(module.norms) == LAYERS + before
    y = states(LAYERS + 1)
    kept, start = [], 0
    for depth in range(LAYERS + 1):
        got = module(y[depth], kept)
        read = [0] if depth == 0 else [*range(0 if embedding else 1, depth + 1)]
        w = dict(zip(read, module.weight[start : start + len(read)], strict=True))
        start += len(read)
        if before:
            expected = sum(w[k] * norm(module.norms[k], y[k]) for k in read)
        else:
            expected = sum(w[k] * y[k] for k in read)
            expected = norm(module.norms[depth - 1], expected) if depth else expected
        torch.testing.assert_close(got, expected)
    assert start == module.weight.numel()


def test_dlcl_is_initially_an_average() -> None:
    module = make_combination("dlcl", True)
    rows = [module.row(depth).tolist() for depth in range(LAYERS + 1)]
    assert rows == [pytest.approx([1 / count] * count) for count in range(1, LAYERS + 2)]


@pytest.mark.parametrize("embedding", [True, False], ids=["embedding", "without"])
def test_dense_equals_its_equation(embedding: bool) -> None:
    module = make_combination("dense", False, embedding=embedding)
    y = states(LAYERS + 1)
    module.double()
    kept: list[Any] = []
    for depth in range(LAYERS + 1):
        torch.testing.assert_close(module(y[depth], kept), y[depth])  # at first
    shaken(module)
    kept = []
    for depth in range(LAYERS + 1):
        got = module(y[depth], kept)
        if depth > 0:
            read = y[0 if embedding else 1 : depth + 1]
            expected = torch.cat(read, -1) @ torch.cat([*module.maps[depth - 1]], 1).t()
            torch.testing.assert_close(got, expected)


# Initialisation

BUILD: dict[str, Any] = {
    **{name: lambda name=name: make(name) for name in ORACLES},
    "embedding": lambda: make("transparent", embedding=True, embedding_norm=True),
    "feed-forward": lambda: make("fine-grained", ffn_dim=FFN, normalize_before=True),
    **{name: lambda name=name: make_combination(name, True) for name in methods(Combination)},
}


@pytest.mark.parametrize("name", BUILD)
def test_reset_parameters_initialises_what_was_built_on_the_meta_device(name: str) -> None:
    with torch.device("meta"):
        module = BUILD[name]()
    assert all(x.is_meta for x in module.state_dict().values())
    module.to_empty(device="cpu")
    for x in module.state_dict().values():
        x.fill_(float("nan") if x.is_floating_point() else 0)
    other = BUILD[name]()
    for each in (module, other):
        torch.manual_seed(3)
        each.reset_parameters()
    for key, x in other.state_dict().items():
        assert torch.equal(module.state_dict()[key], x), key
    # Within the range of a module that was built as usual, and not all of it constant where that is not.
    for key, x in BUILD[name]().state_dict().items():
        again = module.state_dict()[key]
        assert again.isfinite().all() and (again.max() == again.min()) == (x.max() == x.min()), key
        assert again.double().abs().max() <= 2 * x.double().abs().max() + 1e-9, key


@pytest.mark.parametrize("name", [*methods(EncoderFusion), *methods(LayerAttention), *methods(Combination)])
def test_the_registry_describes_each_method(name: str) -> None:
    method = methods()[name]
    assert method.name == name and method.__doc__
    if method.layer_shares is not None and issubclass(method, EncoderFusion):
        shares = shaken(make(name)).layer_shares(states())
        assert shares.shape[-1] == LAYERS


# Sizes, for d = 512 and L = 6, as each method's file states them

STATED = {
    "average": 0,
    "concat": 1_572_864,
    "dwatt": 1_857_536,
    "representation": 263_169,
    "lstm": 2_101_248,
    "routing": 1_572_864,
    "transparent": 1_060,
    "fine-grained": 19_456,
}


def parameters(module: Any) -> int:
    return sum(p.numel() for p in module.parameters())


@pytest.mark.parametrize("name", STATED)
def test_stated_size(name: str) -> None:
    method: Any = methods()[name]
    layers = (6,) if issubclass(method, LayerAttention) else ()
    assert parameters(method(6, 512, *layers)) == STATED[name]


@pytest.mark.parametrize(
    ("name", "before", "size"),
    [("dlcl", False, 6_172), ("dlcl", True, 7_196), ("dense", False, 7_077_888)],
)
def test_stated_size_inside_a_stack(name: str, before: bool, size: int) -> None:
    assert parameters(make_combination(name, before, 6, 512)) == size
    less = 6 if name == "dlcl" else 6 * 512**2
    assert parameters(make_combination(name, before, 6, 512, embedding=False)) == size - less


def test_the_size_that_the_paper_prints() -> None:
    """On RoBERTa-large 26.33 million, by its formulas 26.24; Concat 25.18 and 25.17."""
    sizes = {name: parameters(make(name, 24, 1024)) for name in ("dwatt", "concat")}
    assert sizes["dwatt"] == pytest.approx(26.33e6, rel=0.005) == pytest.approx(26.24e6, rel=0.005)
    assert sizes["concat"] == pytest.approx(25.18e6, rel=0.005)
