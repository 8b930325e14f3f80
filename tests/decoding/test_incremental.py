"""The fast decoder equals the modules: log-probabilities at each step, and translations.

Also tests ``decoding/cache.py``, ``decoding/eligibility.py``, ``decoding/encoder_out.py`` and
``decoding/step.py``.
"""

import copy
import pickle
from typing import Any

import pytest
import torch
from fairseq import search, tasks
from fairseq.sequence_generator import SequenceGenerator
from fairseq.utils import move_to_cuda
from torch import Tensor

from surface_fusion.decoding import incremental
from surface_fusion.decoding.encoder_out import ReorderedEncoderOut
from surface_fusion.errors import SurfaceFusionError
from tests.helpers.tiny import SHARED, batch, beam_orders, loss, pad_rows, parse, shaken

ATT, MEAN, MAX = (("--surfacefusion", source) for source in ("att", "mean", "max"))
HARD = ("--sf-mode", "hard", "--sf-gate", "0.8")
LEARNED = ("--sf-mode", "hard", "--sf-gate", "0")
SOFT = ("--sf-mode", "soft", "--sf-softmax-tau", "0.7")
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
NARROW = ("--encoder-embed-dim", "24", "--decoder-embed-dim", "16")
LEARNED_POSITIONS = ("--layernorm-embedding", "--encoder-learned-pos", "--decoder-learned-pos")
CONFIGS = [
    (),
    (*PRE_NORM, SHARED),
    ("--layer-wise-attention", "--encoder-layers", "3"),
    ("--decoder-layerdrop", "0.3", "--encoder-layerdrop", "0.3"),
    ("--no-token-positional-embeddings",),
    (*ATT, *HARD),
    (*ATT, *LEARNED, *PRE_NORM, "--sf-linear"),
    (*ATT, *SOFT, "--sf-attention-heads", "4", *LEARNED_POSITIONS),
    (*ATT, *HARD, "--decoder-layers", "3", "--sf-idx", "0", "--no-scale-embedding"),
    (*ATT, *LEARNED, "--sf-renormalize", *NARROW, "--layer-wise-attention", "--sf-posedemb"),
    (*ATT, *HARD, "--decoder-output-dim", "12", "--activation-fn", "gelu"),
    (*ATT, "--sf-mode", "postnorm_v1", "--checkpoint-activations"),
    (*MEAN, *LEARNED, "--no-sf-ffn"),
    (*MAX, *SOFT, SHARED, "--decoder-normalize-before", "--no-decoder-final-norm"),
]
STATIC = pytest.mark.parametrize("static", [False, True], ids=["exact", "static"])
"""Static is the shapes of CUDA graphs, here without the graphs."""


def plain_twin(model: Any) -> Any:
    """The same parameters, decoded by the modules."""
    twin = copy.deepcopy(model)
    twin.decoder.cfg.sf_plain = True
    assert twin.encoder.cfg.sf_plain
    return twin


def fast_state(model: Any, incremental_state: dict[str, Any]) -> Any:
    return model.decoder.get_incremental_state(incremental_state, incremental.STATE)


@torch.no_grad()
def steps(model: Any, sample: dict[str, Any], beam: int, orders: list[Tensor]) -> tuple[list, list, Any]:
    """Log-probabilities and attention of each step of a search that takes *orders*, and the fast state."""
    net = sample["net_input"]
    tokens = net["prev_output_tokens"]
    encoder_out = model.encoder.forward_torchscript(net)
    rows = torch.arange(len(net["src_tokens"])).repeat_interleave(beam)
    encoder_out = model.encoder.reorder_encoder_out(encoder_out, rows)
    state: dict[str, Any] = {}
    log_probs, attention = [], []
    for step in range(tokens.shape[1]):
        if step:
            order = orders[step]
            model.decoder.reorder_incremental_state_scripting(state, order)
            encoder_out = model.encoder.reorder_encoder_out(encoder_out, order)
            tokens = tokens[order]
        logits, extra = model.decoder(tokens[:, : step + 1], encoder_out=encoder_out, incremental_state=state)
        log_probs.append(model.get_normalized_probs((logits, extra), log_probs=True))
        attention.append(extra["attn"][0])
    return log_probs, attention, fast_state(model, state)


def search_batch(sentences: int, beam: int, length: int, seed: int = 0) -> dict[str, Any]:
    """Sources of several lengths, and full-length prefixes of their hypotheses."""
    sample = batch(tuple(3 + i % 5 for i in range(sentences)), (length,) * sentences, seed=seed)
    prefixes = batch((3,) * sentences * beam, (length,) * sentences * beam, seed=seed)
    sample["net_input"]["prev_output_tokens"] = prefixes["net_input"]["prev_output_tokens"]
    return sample


def assert_same_steps(fast: Any, plain: Any, sample: dict[str, Any], beam: int, orders: list[Tensor]) -> Any:
    mine, my_attention, state = steps(fast, sample, beam, orders)
    theirs, their_attention, no_state = steps(plain, sample, beam, orders)
    assert state is not None and no_state is None
    tolerance = {"atol": 1e-5, "rtol": 1e-5}
    for a, b, mine_read, theirs_read in zip(mine, theirs, my_attention, their_attention, strict=True):
        torch.testing.assert_close(a, b, **tolerance)
        torch.testing.assert_close(mine_read, theirs_read, **tolerance)
    return state


@STATIC
@pytest.mark.parametrize("beam", [1, 3])
@pytest.mark.parametrize("flags", CONFIGS, ids=" ".join)
def test_every_step_equals_the_modules(flags: tuple[str, ...], beam: int, static: bool) -> None:
    model = shaken(*flags)
    model.decoder.fast_decoding.static = static
    orders = beam_orders(7, sentences=4, beam=beam)
    assert_same_steps(model, plain_twin(model), search_batch(4, beam, 7), beam, orders)


def test_an_input_projection_equals_the_modules() -> None:
    """No flag makes one, fairseq's decoder knows it."""
    model = shaken(*ATT, *HARD)
    model.decoder.project_in_dim = torch.nn.Linear(16, 16, bias=False)
    assert_same_steps(model, plain_twin(model), search_batch(3, 2, 4), 2, beam_orders(4, beam=2))


@STATIC
@pytest.mark.slow
def test_a_long_search_in_which_most_sentences_end(static: bool) -> None:
    """The cache grows and is moved, sentences of all places end, a second batch finds used caches."""
    model, beam = shaken(*ATT, *LEARNED), 2
    model.decoder.fast_decoding.static = static
    plain = plain_twin(model)
    for seed, sentences in enumerate((9, 7)):
        generator = torch.Generator().manual_seed(seed)
        left, orders = sentences, []
        for step in range(70):
            kept = torch.arange(left)
            if step % 8 == 5 and left > 1:
                kept = kept[kept != int(torch.randint(left, (1,), generator=generator))]
            left = len(kept)
            lanes = torch.randint(beam, (left, beam), generator=generator)
            orders.append((kept[:, None] * beam + lanes).flatten())
        sample = search_batch(sentences, beam, 70, seed)
        state = assert_same_steps(model, plain, sample, beam, orders)
        assert state.slot.cache.length == 128 and state.slot.cache.sentences < sentences


@STATIC
@torch.no_grad()
def test_rows_of_a_caller_without_beams_may_be_reordered_freely(static: bool) -> None:
    """No repetition by fairseq's generator came before: any row may follow any other, and again."""
    model, net = shaken(*ATT, *HARD), batch((5, 3, 4), (6, 6, 6))["net_input"]
    model.decoder.fast_decoding.static = static
    tokens, out = net["prev_output_tokens"], model.encoder.forward_torchscript(net)
    state: dict[str, Any] = {}
    orders = [[2, 1, 0, 1, 1], [4, 2, 2, 0, 1], [3, 0, 1, 1], [1, 2, 0, 3], [3, 1]]
    for step in range(6):
        if step:
            order = torch.tensor(orders[step - 1])
            model.decoder.reorder_incremental_state_scripting(state, order)
            out, tokens = model.encoder.reorder_encoder_out(out, order), tokens[order]
        prefix = tokens[:, : step + 1]
        mine, expected = model.decoder(prefix, out, state)[0], model.decoder(prefix, out)[0][:, -1:]
        torch.testing.assert_close(mine, expected, atol=1e-5, rtol=1e-5)
    assert fast_state(model, state).decoded == 6


@torch.no_grad()
def test_two_reorderings_and_none_before_a_step() -> None:
    model, beam = shaken(*ATT, *HARD), 3
    sample, outs = search_batch(2, beam, 4), []
    orders = [[], [[1, 0, 2, 5, 3, 3]], [[2, 2, 0, 3, 5, 4], [0, 2, 1, 4, 4, 5]], []]
    for which in (model, plain_twin(model)):
        net, state = sample["net_input"], {}
        out = which.encoder.reorder_encoder_out(
            which.encoder.forward_torchscript(net), torch.arange(2).repeat_interleave(beam)
        )
        for step in range(4):
            for order in orders[step]:
                which.decoder.reorder_incremental_state_scripting(state, torch.tensor(order))
                out = which.encoder.reorder_encoder_out(out, torch.tensor(order))
            outs.append(which.decoder(net["prev_output_tokens"][:, : step + 1], out, state)[0])
    for a, b in zip(outs[:4], outs[4:], strict=True):
        torch.testing.assert_close(a, b, atol=1e-5, rtol=1e-5)


# fairseq's generator


def translate(models: list[Any], sample: dict[str, Any], beam: int, **kwargs: Any) -> list[list[dict]]:
    dictionary = tasks.setup_task(parse()).target_dictionary
    prefix = kwargs.pop("prefix_tokens", None)
    make = kwargs.pop("strategy", None)
    generator = SequenceGenerator(
        models, dictionary, beam_size=beam, search_strategy=make and make(dictionary), **kwargs
    )
    torch.manual_seed(7)
    return generator.generate(models, sample, prefix_tokens=prefix)


def assert_same_translations(mine: list[list[dict]], theirs: list[list[dict]]) -> None:
    for a, b in zip(mine, theirs, strict=True):
        assert [h["tokens"].tolist() for h in a] == [h["tokens"].tolist() for h in b]
        for x, y in zip(a, b, strict=True):
            for name in ("score", "positional_scores", "attention"):
                torch.testing.assert_close(x[name].cpu(), y[name].cpu(), atol=1e-5, rtol=1e-5)


SEARCHES: dict[str, dict[str, Any]] = {
    "greedy": {"beam": 1},
    "beam": {"beam": 4},
    "long": {"beam": 4, "min_len": 36, "max_len_b": 45},
    "length penalty": {"beam": 4, "len_penalty": 0.3, "max_len_a": 1.2, "max_len_b": 10},
    "temperature": {"beam": 3, "temperature": 1.7, "unk_penalty": 0.5, "no_repeat_ngram_size": 2},
    "prefix": {"beam": 4, "prefix_tokens": pad_rows([torch.tensor([5, 9, 7]), torch.tensor([6])] * 3, False)},
    "sampling": {"beam": 3, "strategy": lambda d: search.Sampling(d, sampling_topk=10)},
    "diverse": {"beam": 4, "strategy": lambda d: search.DiverseBeamSearch(d, 2, 0.5)},
    "siblings": {"beam": 4, "strategy": lambda d: search.DiverseSiblingsSearch(d, 0.5)},
}


@STATIC
@pytest.mark.parametrize("name", SEARCHES)
@pytest.mark.parametrize("flags", [(), (*ATT, *LEARNED, SHARED), (*ATT, *SOFT)], ids=" ".join)
@pytest.mark.slow
def test_every_search_strategy_gives_the_translations_of_the_modules(
    flags: tuple[str, ...], name: str, static: bool
) -> None:
    seed = int(static)
    model = shaken(*flags, seed=seed)
    model.decoder.fast_decoding.static = static
    sample = batch((5, 7, 3, 9, 2, 6), (4,) * 6, seed=seed)
    arguments = {"max_len_b": 20, **SEARCHES[name]}
    mine = translate([model], sample, **arguments)
    assert_same_translations(mine, translate([plain_twin(model)], sample, **arguments))


@STATIC
def test_ensembles_give_the_translations_of_the_modules(static: bool) -> None:
    """Of different models, with a Transformer of fairseq, and of one model twice."""
    models = [shaken(*ATT, *HARD, seed=1), shaken(*MEAN, *SOFT, seed=2), shaken(arch="transformer", seed=3)]
    for model in models[:2]:
        model.decoder.fast_decoding.static = static
    twins = [*map(plain_twin, models[:2]), models[2]]
    sample = batch((5, 7, 3), (4, 4, 4))
    for members in ([0, 1], [0, 2], [1, 1]):
        mine = translate([models[i] for i in members], sample, 4, max_len_b=15)
        assert_same_translations(mine, translate([twins[i] for i in members], sample, 4, max_len_b=15))


def test_a_second_search_with_another_beam_or_batch_starts_clean() -> None:
    """Nothing of an earlier search is left over."""
    model = shaken(*ATT, *HARD)
    plain = plain_twin(model)
    for beam, lengths in ((4, (5, 7, 3, 4)), (1, (5, 7, 3, 4)), (2, (2,)), (4, (9, 40))):
        sample = batch(lengths, (4,) * len(lengths))
        assert_same_translations(
            translate([model], sample, beam, max_len_b=12), translate([plain], sample, beam, max_len_b=12)
        )


@pytest.mark.parametrize("need", [True, False])
def test_attention_is_returned_unless_need_attn_is_false(need: bool) -> None:
    model = shaken(*ATT, *HARD)
    model.make_generation_fast_(need_attn=need)
    hypothesis = translate([model], batch((5, 3), (4, 4)), 2, max_len_b=8)[0][0]
    assert hypothesis["attention"].shape == ((5, len(hypothesis["tokens"])) if need else (0,))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_half_and_double_precision_equal_the_modules(dtype: torch.dtype) -> None:
    model = shaken(*ATT, *LEARNED).to(dtype)
    orders = beam_orders(6)
    mine, _, state = steps(model, search_batch(3, 3, 6), 3, orders)
    theirs, _, _ = steps(plain_twin(model), search_batch(3, 3, 6), 3, orders)
    assert state.slot.cache.self_kv.dtype == dtype
    tolerance = {torch.float16: 2e-2, torch.bfloat16: 2e-1, torch.float64: 2e-6}[
        dtype
    ]  # fairseq's softmax is float32
    for a, b in zip(mine, theirs, strict=True):
        torch.testing.assert_close(a, b, atol=tolerance, rtol=0)


# Weights that change, copies


def test_parameter_changes_between_searches_are_noticed() -> None:
    """As with --eval-bleu; also changes that leave no trace in a parameter's version."""
    model, sample = shaken(*ATT, *HARD), batch((5, 3), (4, 4))
    for change in range(3):
        assert_same_translations(
            translate([model], sample, 3, max_len_b=10),
            translate([plain_twin(model)], sample, 3, max_len_b=10),
        )
        if change == 0:
            optimizer = torch.optim.SGD(model.parameters(), 0.5)
            loss(model.train(), sample).backward()
            assert not model.decoder.fast_decoding._slots
            optimizer.step()
            model.eval()
        elif change == 1:
            for parameter in model.parameters():
                parameter.data.mul_(1.3)
        else:
            model.load_state_dict(shaken(*ATT, *HARD, seed=5).state_dict())


@STATIC
def test_copies_and_pickles_after_a_translation(static: bool) -> None:
    model, sample = shaken(*ATT, *HARD), batch((5, 3), (4, 4))
    model.decoder.fast_decoding.static = static
    names = set(model.state_dict())
    expected = translate([model], sample, 3, max_len_b=10)
    assert set(model.state_dict()) == names
    for twin in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert twin.decoder.fast_decoding is not model.decoder.fast_decoding
        assert not twin.decoder.fast_decoding._slots
        assert_same_translations(translate([twin], sample, 3, max_len_b=10), expected)


@STATIC
def test_searches_inside_and_outside_inference_mode_alternate(static: bool) -> None:
    model, sample = shaken(*ATT, *HARD), batch((5, 3), (4, 4))
    model.decoder.fast_decoding.static = static
    with torch.inference_mode():
        first = translate([model], sample, 3, max_len_b=10)
    assert_same_translations(translate([model], sample, 3, max_len_b=10), first)
    with torch.inference_mode():
        assert_same_translations(translate([model], sample, 3, max_len_b=10), first)


def test_static_caches_have_few_sizes() -> None:
    """What a graph would be captured for: powers of two, whatever the batch."""
    model = shaken(*ATT, *HARD)
    fast = model.decoder.fast_decoding
    fast.static = True
    for lengths in ((5, 7, 3), (9, 4, 6, 2), (40, 3, 5), (6, 2, 8)):
        translate([model], batch(lengths, (4,) * len(lengths)), 2, max_len_b=40, min_len=35)
        assert all(slot.owner() is None for slot in fast._slots)
    sizes = [(x.cache.sentences, x.cache.length, x.cache.source) for x in fast._slots]
    assert sorted(sizes)[-1] == (4, 64, 64)
    assert len(sizes) == len({s for s, *_ in sizes}) <= 2


# What does not decode fast


@pytest.mark.parametrize(
    "flags",
    [
        ("--sf-plain",),
        ("--cross-self-attention",),
        ("--no-cross-attention",),
        ("--quant-noise-pq", "0.1"),
    ],
    ids=" ".join,
)
def test_unsupported_options_are_decoded_by_the_modules(flags: tuple[str, ...], caplog: Any) -> None:
    model = shaken(*ATT, *HARD, *flags)
    caplog.set_level("INFO", logger=incremental.logger.name)
    for _ in range(2):
        translate([model], batch((5, 3), (4, 4)), 2, max_len_b=6)
    assert not model.decoder.fast_decoding._slots and model.decoder.fast_decoding._weights is None
    reasons = [record for record in caplog.records if record.name == incremental.logger.name]
    assert len(reasons) == 1, caplog.text


def test_adaptive_softmax_and_retained_dropout_are_decoded_by_the_modules() -> None:
    adaptive = shaken("--adaptive-softmax-cutoff", "20,40")
    noisy = shaken(*ATT, *HARD, "--dropout", "0.3")
    noisy.make_generation_fast_(retain_dropout=True)
    for model in (adaptive, noisy):
        translate([model], batch((5, 3), (4, 4)), 2, max_len_b=6)
        assert model.decoder.fast_decoding._weights is None


def test_the_modules_decode_in_training_and_with_gradients() -> None:
    model, net = shaken(*ATT, *HARD), batch()["net_input"]
    out, tokens = model.encoder(net["src_tokens"]), net["prev_output_tokens"][:, :1]
    for training, gradients in ((False, True), (True, False)):
        model.train(training)
        state: dict[str, Any] = {}
        with torch.set_grad_enabled(gradients):
            logits, extra = model.decoder(tokens, out, state)
        assert fast_state(model, state) is None and logits.requires_grad == gradients
        assert len(extra["inner_states"]) == 3


@torch.no_grad()
def test_invalid_orders_and_tokens_are_refused() -> None:
    model = shaken(*ATT, *HARD)
    net, state = search_batch(2, 2, 4)["net_input"], {}
    out = model.encoder.forward_torchscript(net)
    out = model.encoder.reorder_encoder_out(out, torch.tensor([0, 0, 1, 1]))
    model.decoder(net["prev_output_tokens"][:, :1], out, state)
    with pytest.raises(SurfaceFusionError, match="5 hypotheses after 4 at beam 2"):
        model.decoder.reorder_incremental_state_scripting(state, torch.tensor([0, 1, 1, 2, 3]))
    with pytest.raises(SurfaceFusionError, match="one token a call"):
        model.decoder(net["prev_output_tokens"][:, :3], out, state)


@torch.no_grad()
def test_features_only_gives_the_input_of_the_output_layer() -> None:
    model, sample = shaken(*ATT, *HARD), search_batch(2, 2, 3)
    net = sample["net_input"]
    out = model.encoder.reorder_encoder_out(
        model.encoder.forward_torchscript(net), torch.tensor([0, 0, 1, 1])
    )
    features, _ = model.decoder(net["prev_output_tokens"][:, :1], out, {}, features_only=True)
    logits, _ = model.decoder(net["prev_output_tokens"][:, :1], out, {})
    assert torch.equal(model.decoder.output_layer(features), logits)


# The encoder's output


@torch.no_grad()
def test_encoder_output_is_reordered_lazily() -> None:
    model = shaken(*ATT, *HARD)
    out = model.encoder(batch()["net_input"]["src_tokens"], return_all_hiddens=True)
    expected = dict(out, encoder_states=list(out["encoder_states"]))
    mine: Any = out
    for order in (torch.tensor([0, 0, 1, 1, 2, 2]), torch.tensor([1, 0, 5, 4])):
        mine = model.encoder.reorder_encoder_out(mine, order)
        expected = super(type(model.encoder), model.encoder).reorder_encoder_out(expected, order)
    assert isinstance(mine, ReorderedEncoderOut)
    assert set(mine) == set(expected) and len(mine) == len(expected)
    for name, tensors in expected.items():
        assert len(mine[name]) == len(tensors)
        assert all(torch.equal(a, b) for a, b in zip(mine[name], tensors, strict=True))


def test_the_beam_size_is_inferred_from_repeated_sentences() -> None:
    sentences = {"encoder_padding_mask": [torch.zeros(2, 3)]}
    for rows, beam in (
        ([0, 1], 1),
        ([0, 0, 1, 1], 2),
        ([0, 1, 0, 1], None),
        ([1, 0], None),
        ([0, 0, 1], None),
    ):
        assert ReorderedEncoderOut(sentences, torch.tensor(rows)).beam() == beam


# CUDA


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
@pytest.mark.parametrize(
    "flags",
    [
        *((), (*ATT, *LEARNED), (*MEAN, *SOFT), (*ATT, "--encoder-fusion", "dlcl")),
        *(("--encoder-fusion", "dense"), (*ATT, "--encoder-fusion", "fine-grained")),
    ],
    ids=" ".join,
)
def test_captured_graphs_give_the_translations_of_the_modules(flags: tuple[str, ...]) -> None:
    model = shaken(*flags).cuda()
    plain = plain_twin(model)
    for beam, lengths in ((4, (5, 7, 3, 4, 6)), (1, (5,)), (4, (9, 40))) * 2:
        sample = move_to_cuda(batch(lengths, (4,) * len(lengths)))
        arguments = {"max_len_b": 45, "min_len": 35}
        assert_same_translations(
            translate([model], sample, beam, **arguments), translate([plain], sample, beam, **arguments)
        )
    assert model.decoder.fast_decoding.graphs
    assert any(step for slot in model.decoder.fast_decoding._slots for step in slot.steps.values())


def test_sizes_are_rounded_up_to_powers_of_two() -> None:
    assert [incremental.round_up(n) for n in (1, 2, 3, 4, 5, 64, 65)] == [1, 2, 4, 4, 8, 64, 128]
