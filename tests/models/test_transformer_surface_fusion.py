"""The whole model: plain without fusion, no unused parameter, and everything of fairseq around it."""

import copy
import math
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from fairseq import search, tasks
from fairseq.models.transformer import TransformerDecoderBase, TransformerEncoderBase
from fairseq.sequence_generator import EnsembleModel, SequenceGenerator, SequenceGeneratorWithAlignment
from fairseq.sequence_scorer import SequenceScorer
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.decoder import SurfaceFusionDecoder
from surface_fusion.models.encoder import SurfaceFusionEncoder
from surface_fusion.ops.distributions import exponentiated_log_probs, hard_log_probs
from tests.helpers.tiny import (
    ARCH,
    EOS,
    PAD,
    SHARED,
    SIZES,
    VOCAB,
    assert_incremental_equals_full,
    batch,
    build,
    data_folder,
    gradients,
    log_probs,
    loss,
    parse,
    shaken,
)

ATT = ("--surfacefusion", "att")
SOURCES = [ATT, ("--surfacefusion", "mean"), ("--surfacefusion", "max")]
HARD = ("--sf-mode", "hard", "--sf-gate", "0.8")
LEARNED = ("--sf-mode", "hard", "--sf-gate", "0")
SOFT = ("--sf-mode", "soft", "--sf-softmax-tau", "0.7")
V1 = ("--sf-mode", "postnorm_v1")
FUSIONS = [
    HARD,
    LEARNED,
    (*HARD, "--sf-renormalize"),
    (*LEARNED, "--sf-renormalize"),
    SOFT,
    ("--sf-mode", "postnorm"),
    ("--sf-mode", "soft_5"),
    ("--sf-mode", "postnorm_5"),
    V1,
]
PRE_NORM = ("--encoder-normalize-before", "--decoder-normalize-before")
README_SIZE = 3_150_336  # identity: attention 1,050,624 + feed-forward 2,099,712


# Without fusion

PLAIN_OPTIONS = [
    (),
    (SHARED,),
    ("--share-decoder-input-output-embed", *PRE_NORM),
    ("--layernorm-embedding", "--encoder-learned-pos", "--decoder-learned-pos"),
    ("--encoder-layerdrop", "0.3", "--decoder-layerdrop", "0.3", "--encoder-layers", "4"),
    ("--encoder-embed-dim", "24", "--decoder-embed-dim", "16", "--decoder-output-dim", "12"),
    ("--quant-noise-pq", "0.1"),
    ("--adaptive-softmax-cutoff", "10,20", "--criterion", "adaptive_loss"),
    ("--no-cross-attention",),
    ("--checkpoint-activations",),
]


def train(model: Any, steps: int = 3) -> list[Tensor]:
    """Losses of a few updates with dropout, every random number from one seed."""
    torch.manual_seed(11)
    optimizer = torch.optim.Adam(model.parameters(), 1e-2)
    losses = []
    for step in range(steps):
        optimizer.zero_grad()
        losses.append(loss(model.train(), batch(seed=step)))
        losses[-1].backward()
        optimizer.step()
    return losses


@pytest.mark.parametrize("sf_plain", [False, True], ids=["", "sf-plain"])
@pytest.mark.parametrize("flags", PLAIN_OPTIONS, ids=" ".join)
def test_without_fusion_the_model_equals_fairseqs_transformer_bit_for_bit(
    flags: tuple[str, ...], sf_plain: bool
) -> None:
    flags = ("--dropout", "0.2", "--attention-dropout", "0.1", *flags)
    ours, theirs = (
        build(*flags, *["--sf-plain"] * sf_plain)[0],
        build(*flags, arch="transformer")[0],
    )
    assert list(ours.state_dict()) == list(theirs.state_dict())
    if sf_plain:
        assert [type(m) for m in ours.modules()][1:] == [type(m) for m in theirs.modules()][1:]
        assert type(ours.encoder) is TransformerEncoderBase and type(ours.decoder) is TransformerDecoderBase
    for (name, a), (other, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert name == other and torch.equal(a, b)
    if "--adaptive-softmax-cutoff" in flags:
        nets = [m.eval()(**batch()["net_input"])[0] for m in (ours, theirs)]
        assert torch.equal(*nets)
        return
    assert torch.equal(log_probs(ours.eval(), batch()), log_probs(theirs.eval(), batch()))
    assert [x.item() for x in train(ours)] == [x.item() for x in train(theirs)]
    for (name, a), (_, b) in zip(ours.named_parameters(), theirs.named_parameters(), strict=True):
        assert torch.equal(a, b), name


@pytest.mark.parametrize("flag", [ATT, ("--layer-wise-attention",)], ids=" ".join)
def test_encoder_and_decoder_classes_with_fusion(flag: tuple[str, ...]) -> None:
    model, _ = build(*flag)
    assert type(model.encoder) is SurfaceFusionEncoder and type(model.decoder) is SurfaceFusionDecoder


# Parameters


def test_parameter_count_of_the_published_model() -> None:
    def size(*flags: str) -> int:
        args = parse(SHARED, *flags)
        return sum(p.numel() for p in tasks.setup_task(args).build_model(args).parameters())

    with torch.device("meta"):
        plain = size()
        assert size(*ATT, "--sf-gate", "0.8", "--sf-mode", "hard") == plain + README_SIZE
        assert size(*ATT, "--sf-mode", "soft") == plain + README_SIZE
        assert size(*ATT) == plain + README_SIZE + 1024, "a learned gate is one vector of 2 x 512"
        assert size(*ATT, *HARD, "--sf-linear") == plain + README_SIZE + 2 * 512 * 512
        assert size(*ATT, *HARD, "--no-sf-ffn") == plain + 1_050_624
        assert size("--surfacefusion", "mean", *HARD) == plain + 2_099_712
        assert size("--surfacefusion", "max", *HARD, "--no-sf-ffn") == plain
        assert size("--layer-wise-attention") == plain


def test_initial_values_have_the_published_scales() -> None:
    model, _ = build(
        *ATT, *LEARNED, "--sf-linear", "--encoder-embed-dim", "64", "--encoder-ffn-embed-dim", "256"
    )
    decoder = model.decoder
    for layer in (decoder.fc1, decoder.fc2, decoder.tgt_out_dim, decoder.src_out_dim):
        bound = math.sqrt(6 / sum(layer.weight.shape))  # Xavier-uniform
        assert 0.98 * bound < layer.weight.abs().max() <= bound
        assert layer.bias is None or (layer.bias == 0).all()
    assert decoder.meanmaxweight.shape == (1, 128)
    assert abs(decoder.meanmaxweight.std().item() / 64**-0.5 - 1) < 0.2
    assert 0.9 < decoder.sf_attn.q_proj.weight.abs().max() / (2**-0.5 * math.sqrt(6 / 128)) <= 1


def test_initial_values_of_the_plain_part_equal_those_without_fusion() -> None:
    """Fusion draws its random numbers after the Transformer's: runs with and without it compare."""
    plain, fused = build(SHARED)[0], build(SHARED, *ATT, *LEARNED)[0]
    for name, value in plain.state_dict().items():
        if "_float_tensor" not in name:
            assert torch.equal(fused.state_dict()[name], value), name


OPTIONS = [
    ("--no-sf-ffn",),
    ("--sf-linear", *PRE_NORM),
    ("--sf-posedemb", "--layernorm-embedding", SHARED),
    ("--encoder-learned-pos", "--decoder-learned-pos", "--share-decoder-input-output-embed"),
    ("--layer-wise-attention", *PRE_NORM),
    ("--quant-noise-pq", "0.1"),
    ("--checkpoint-activations",),
    ("--no-token-positional-embeddings", "--no-scale-embedding"),
    ("--cross-self-attention",),
    ("--sf-pool-published",),
]
ATT_OPTIONS = [
    ("--sf-attention-heads", "4", "--sf-idx", "0"),
    ("--sf-no-detach", *PRE_NORM),
    ("--encoder-embed-dim", "24", "--decoder-embed-dim", "16"),
    ("--decoder-output-dim", "12"),
    ("--sf-no-detach", "--layer-wise-attention", "--encoder-layers", "3"),
]


def assert_all_used(flags: tuple[str, ...]) -> None:
    model, _ = build("--dropout", "0.1", *flags)
    assert [name for name, grad in gradients(model.train(), batch()).items() if grad is None] == []


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
def test_no_parameter_is_unused(fusion: tuple[str, ...], source: tuple[str, ...]) -> None:
    for option in ((), *OPTIONS):
        assert_all_used((*source, *fusion, *option))


@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
def test_no_parameter_is_unused_by_the_attention(fusion: tuple[str, ...]) -> None:
    for option in ATT_OPTIONS:
        assert_all_used((*ATT, *fusion, *option))


DDP_FLAGS = [
    (*ATT, *HARD, SHARED),
    (*ATT, *LEARNED, "--sf-linear", "--layer-wise-attention"),
    ("--surfacefusion", "mean", *SOFT),
    ("--surfacefusion", "max", *V1, "--no-sf-ffn"),
    (*ATT, *HARD, "--sf-renormalize", "--sf-no-detach", "--sf-posedemb"),
]


def ddp_worker(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", f"file://{folder}/store", rank=rank, world_size=2)
    for i, flags in enumerate(DDP_FLAGS):
        model, _ = build(*flags)
        model.train()
        ddp = torch.nn.parallel.DistributedDataParallel(model, find_unused_parameters=False)
        for step in range(2):  # an unused parameter shows at the second step
            sample = batch(seed=2 * step + rank)
            out = model.get_normalized_probs(ddp(**sample["net_input"]), log_probs=True)
            picked = out.gather(-1, sample["target"].unsqueeze(-1)).squeeze(-1)
            model.zero_grad()
            (-picked[sample["target"].ne(PAD)].sum()).backward()
        grads = {n: p.grad for n, p in model.named_parameters()}
        torch.save(grads, f"{folder}/{i}_{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_distributed_data_parallel_with_two_processes(tmp_path: Path) -> None:
    torch.multiprocessing.spawn(ddp_worker, (str(tmp_path),), nprocs=2)
    for i, flags in enumerate(DDP_FLAGS):
        model, _ = build(*flags)
        parts = [gradients(model.train(), batch(seed=2 + rank)) for rank in range(2)]
        for rank in range(2):
            for name, grad in torch.load(tmp_path / f"{i}_{rank}.pt").items():
                mean = (parts[0][name] + parts[1][name]) / 2
                torch.testing.assert_close(grad, mean, atol=1e-5, rtol=1e-4, msg=f"{flags} {name}")


# Training


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", FUSIONS[:-1], ids=" ".join)
def test_sixty_updates_reduce_the_loss(fusion: tuple[str, ...], source: tuple[str, ...]) -> None:
    model, _ = build(*source, *fusion, SHARED)
    sample = batch()
    optimizer = torch.optim.Adam(model.parameters(), 5e-3)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        losses.append(loss(model.train(), sample))
        losses[-1].backward()
        optimizer.step()
    assert losses[-1] < 0.35 * losses[0]


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
def test_label_smoothed_loss(fusion: tuple[str, ...], source: tuple[str, ...]) -> None:
    """fairseq's criterion: (1 - eps - eps_i) nll + eps_i sum_v -log p_v, eps_i = eps / (V - 1)."""
    flags = (*source, *fusion, "--criterion", "label_smoothed_cross_entropy", "--label-smoothing", "0.1")
    args = parse(*SIZES, *flags)
    task = tasks.setup_task(args)
    model, sample = shaken(*flags), batch()
    value, size, logged = task.build_criterion(args)(model, sample)
    minus = -log_probs(model, sample)[sample["target"].ne(PAD)]
    nll = minus.gather(-1, sample["target"][sample["target"].ne(PAD)].unsqueeze(-1)).sum()
    eps_i = 0.1 / (VOCAB - 1)
    torch.testing.assert_close(value, (1 - 0.1 - eps_i) * nll + eps_i * minus.sum())
    torch.testing.assert_close(torch.as_tensor(logged["nll_loss"]), nll)
    assert size == 15


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_is_close_to_float32(
    dtype: torch.dtype, fusion: tuple[str, ...], source: tuple[str, ...]
) -> None:
    model, sample = shaken(*source, *fusion, "--sf-linear"), batch()
    exact = log_probs(model, sample)
    with torch.no_grad():
        near = log_probs(model.to(dtype), sample)
    assert near.dtype == torch.float32
    torch.testing.assert_close(near, exact, atol=0.03 if dtype == torch.float16 else 0.25, rtol=0)


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", [HARD, LEARNED, SOFT], ids=" ".join)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_half_precision_trains(dtype: torch.dtype, fusion: tuple[str, ...], source: tuple[str, ...]) -> None:
    model, _ = build(*source, *fusion, SHARED, "--dropout", "0.2")
    grads = gradients(model.to(dtype).train(), batch())
    assert all(g is not None and g.dtype == dtype and g.isfinite().all() for g in grads.values())


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", [HARD, LEARNED, (*LEARNED, "--sf-renormalize"), SOFT, V1], ids=" ".join)
def test_autocast_is_close_to_float32(fusion: tuple[str, ...], source: tuple[str, ...]) -> None:
    model, sample = shaken(*source, *fusion), batch()
    exact = log_probs(model, sample)
    with torch.autocast("cpu", torch.bfloat16):
        near = log_probs(model, sample)
        grads = gradients(model, sample)
    assert near.dtype == torch.float32
    torch.testing.assert_close(near, exact, atol=0.25, rtol=0)
    assert all(g is not None and g.isfinite().all() for g in grads.values())


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
def test_scalar_quantisation_noise(source: tuple[str, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in (torch.nn.Module, Tensor):  # fairseq insists on a GPU
        monkeypatch.setattr(kind, "cuda", lambda x: x)
    model, _ = build(*source, *HARD, "--quant-noise-scalar", "0.3")
    grads = gradients(model.train(), batch())
    assert all(g is not None and g.isfinite().all() for g in grads.values())


def test_deep_copies_are_independent() -> None:
    """What fairseq's exponential moving average does."""
    model, sample = (
        shaken(*ATT, *LEARNED, "--encoder-layerdrop", "0.2", "--decoder-layerdrop", "0.2"),
        batch(),
    )
    other = copy.deepcopy(model)
    before = log_probs(model, sample)
    assert torch.equal(log_probs(other, sample), before)
    with torch.no_grad():
        other.decoder.sf_attn.v_proj.weight.zero_()
    assert torch.equal(log_probs(model, sample), before)


def test_retained_dropout_accepts_the_class_names_of_fairseq() -> None:
    model, sample = shaken(*ATT, *HARD, "--dropout", "0.3"), batch()
    assert torch.equal(log_probs(model, sample), log_probs(model, sample))
    names = ["TransformerEncoder", "TransformerDecoder"]
    model.make_generation_fast_(retain_dropout=True, retain_dropout_modules=names)
    for part in (
        model.encoder.dropout_module,
        model.decoder.dropout_module,
        model.decoder.activation_dropout,
    ):
        assert part.apply_during_inference
    assert not model.decoder.sf_attn.dropout_module.apply_during_inference
    assert not torch.equal(log_probs(model, sample), log_probs(model, sample))


SWITCHES = [
    *("--sf-linear", "--no-sf-ffn", "--sf-posedemb", "--sf-no-detach", "--sf-pool-published"),
    *(
        "--layer-wise-attention",
        "--layernorm-embedding",
        "--cross-self-attention",
        "--checkpoint-activations",
    ),
    *("--encoder-normalize-before", "--decoder-normalize-before", "--no-decoder-final-norm"),
    *("--encoder-learned-pos", "--no-token-positional-embeddings", "--no-scale-embedding"),
]
EMBEDDINGS = [(), (SHARED,), ("--share-decoder-input-output-embed",), ("--merge-src-tgt-embed",)]


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(
    st.sampled_from([(), *SOURCES]),
    st.sampled_from(FUSIONS),
    st.sets(st.sampled_from(SWITCHES), max_size=5),
    st.sampled_from(EMBEDDINGS),
    st.integers(1, 2),
)
def test_any_combination_of_flags(
    source: tuple[str, ...],
    fusion: tuple[str, ...],
    switches: set[str],
    embeddings: tuple[str, ...],
    layers: int,
) -> None:
    """It decodes step by step as in one pass, trains every parameter, and loads what it stored."""
    depth = ("--encoder-layers", str(layers), "--decoder-layers", str(layers))
    flags = (*source, *fusion, *sorted(switches), *embeddings, *depth)
    model = shaken(*flags)
    assert_incremental_equals_full(model)
    assert all(g is not None and g.isfinite().all() for g in gradients(model.train(), batch()).values())
    other, _ = build(*flags, seed=5)
    other.load_state_dict(model.state_dict())
    assert torch.equal(log_probs(other.eval(), batch()), log_probs(model.eval(), batch()))


# Search


def generator(models: list[Any], vocab: tuple[int, int] = (VOCAB, VOCAB), **kwargs: Any) -> SequenceGenerator:
    task = tasks.setup_task(parse(data=data_folder(*vocab)))
    kwargs = {"beam_size": 4, "max_len_b": 8, **kwargs}
    return SequenceGenerator(models, task.target_dictionary, **kwargs)


def rescored(model: Any, sample: dict[str, Any], i: int, tokens: Tensor) -> Tensor:
    """Log-probabilities of a hypothesis for sentence *i*, from one full pass without padding."""
    src = sample["net_input"]["src_tokens"][i]
    src = src[src.ne(PAD)]
    prefix = torch.cat([torch.tensor([EOS]), tokens[:-1]])
    net = {
        "src_tokens": src[None],
        "src_lengths": torch.tensor([len(src)]),
        "prev_output_tokens": prefix[None],
    }
    return log_probs(model, {"net_input": net})[0].gather(-1, tokens.unsqueeze(-1)).squeeze(-1)


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
@torch.no_grad()
def test_every_hypothesis_of_beam_search_scores_as_in_a_full_pass(
    fusion: tuple[str, ...], source: tuple[str, ...]
) -> None:
    few = (VOCAB, 12)  # target words, so that sentences end at different steps
    model = shaken(*source, *fusion, "--decoder-layers", "3", vocab=few, seed=9)
    sample, ends = batch((6, 3, 5), (2, 2, 2)), set()
    for i, hypotheses in enumerate(generator([model], few, beam_size=8)(sample)):
        assert len(hypotheses) == 8
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            ends.add(len(tokens))
            scores = rescored(model, sample, i, tokens)
            torch.testing.assert_close(hypothesis["positional_scores"], scores, atol=3e-5, rtol=0)
            assert hypothesis["score"].item() == pytest.approx(scores.mean().item(), abs=3e-5)
    assert len(ends) > 1


def branches(model: Any, net: dict[str, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """Target logits, surface logits (not scaled by tau) and learned gate (zeros where there is none)."""
    decoder = model.decoder
    features, _ = model(**net, features_only=True)
    assert features.dim() == 4, "a mode of two projections"
    z, s = decoder.output_projection(features).unbind(2)
    gate = decoder.gate(features) if model.cfg.learned_gate else torch.zeros(*z.shape[:2], 1)
    return z, s, gate


@pytest.mark.parametrize("temperature", [0.5, 3.0])
@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", [HARD, LEARNED, V1], ids=" ".join)
@torch.no_grad()
def test_temperature_divides_the_logits_of_both_branches(
    fusion: tuple[str, ...], source: tuple[str, ...], temperature: float
) -> None:
    model, sample = shaken(*source, *fusion), batch(tgt_lengths=(5, 5, 5))
    net = sample["net_input"]
    z, s, gate = (x[:, -1] for x in branches(model, net))
    if fusion is V1:
        expected = exponentiated_log_probs(z / temperature, s / temperature)
    else:
        expected = hard_log_probs(
            torch.stack([z, s], dim=-2) / temperature, gate if fusion is LEARNED else 0.8
        )
    ensemble = EnsembleModel([model])
    ensemble.has_incremental = False  # the whole prefix at once
    out, _ = ensemble.forward_decoder(
        net["prev_output_tokens"], ensemble.forward_encoder(net), [{}], temperature
    )
    torch.testing.assert_close(out, expected, atol=1e-5, rtol=0)


@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
@torch.no_grad()
def test_a_high_temperature_makes_every_mode_uniform(
    fusion: tuple[str, ...], source: tuple[str, ...]
) -> None:
    model, net = shaken(*source, *fusion), batch()["net_input"]
    ensemble = EnsembleModel([model])
    out, _ = ensemble.forward_decoder(
        net["prev_output_tokens"][:, :1], ensemble.forward_encoder(net), [{}], 1e5
    )
    torch.testing.assert_close(out, torch.full_like(out, -math.log(VOCAB)), atol=1e-3, rtol=0)


@pytest.mark.parametrize("fusion", [(*HARD, "--sf-renormalize"), SOFT], ids=" ".join)
@torch.no_grad()
def test_temperature_of_one_projection_divides_the_sum(fusion: tuple[str, ...]) -> None:
    model, net = shaken(*ATT, *fusion), batch(tgt_lengths=(1, 1, 1))["net_input"]
    ensemble = EnsembleModel([model])
    out, _ = ensemble.forward_decoder(net["prev_output_tokens"], ensemble.forward_encoder(net), [{}], 3.0)
    torch.testing.assert_close(out, torch.log_softmax(model(**net)[0][:, -1] / 3, -1), atol=1e-5, rtol=0)


@pytest.mark.parametrize("fusion", [HARD, LEARNED, SOFT, V1], ids=" ".join)
@torch.no_grad()
def test_an_ensemble_with_a_plain_transformer(fusion: tuple[str, ...]) -> None:
    models = [
        shaken(*ATT, *fusion),
        shaken(arch="transformer", seed=2),
        shaken("--surfacefusion", "max", seed=3),
    ]
    sample = batch((6, 3, 5), (2, 2, 2))
    for i, hypotheses in enumerate(generator(models)(sample)):
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            each = torch.stack([rescored(m, sample, i, tokens) for m in models])
            mean = each.exp().mean(0).log()
            torch.testing.assert_close(hypothesis["positional_scores"], mean, atol=3e-5, rtol=0)


@pytest.mark.parametrize("fusion", [HARD, LEARNED, SOFT], ids=" ".join)
@torch.no_grad()
def test_prefix_tokens(fusion: tuple[str, ...]) -> None:
    model, sample = shaken(*ATT, *fusion), batch((6, 3, 5), (2, 2, 2))
    prefix = torch.tensor([[9, 11], [30, PAD], [40, 41]])
    for i, hypotheses in enumerate(generator([model])(sample, prefix_tokens=prefix)):
        for hypothesis in hypotheses:
            tokens = hypothesis["tokens"]
            wanted = prefix[i][prefix[i].ne(PAD)]
            assert torch.equal(tokens[: len(wanted)], wanted)
            scores = rescored(model, sample, i, tokens)
            torch.testing.assert_close(hypothesis["positional_scores"], scores, atol=3e-5, rtol=0)


@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
@torch.no_grad()
def test_sampling(fusion: tuple[str, ...]) -> None:
    model, sample = shaken(*ATT, *fusion), batch((6, 3, 5), (2, 2, 2))
    dictionary = tasks.setup_task(parse()).target_dictionary
    greedy = generator([model], beam_size=1)(sample)
    top = generator([model], beam_size=1, search_strategy=search.Sampling(dictionary, sampling_topk=1))(
        sample
    )
    for a, b in zip(greedy, top, strict=True):
        assert torch.equal(a[0]["tokens"], b[0]["tokens"])
    for kwargs in ({}, {"sampling_topk": 5}, {"sampling_topp": 0.9}):
        torch.manual_seed(0)
        strategy = search.Sampling(dictionary, **kwargs)
        for hypotheses in generator([model], beam_size=3, search_strategy=strategy)(sample):
            assert all(h["score"].isfinite() for h in hypotheses)


def test_sampling_from_hard_fusion_follows_its_normalised_distribution() -> None:
    model, sample = shaken(*ATT, *HARD), batch((4,), (2,))
    expected = log_probs(model, sample)[0, 0].exp()
    expected[PAD] = expected[EOS] = 0  # never the first token
    dictionary = tasks.setup_task(parse()).target_dictionary
    strategy = search.Sampling(dictionary)
    torch.manual_seed(0)
    counts = torch.zeros(VOCAB)
    sampler = generator([model], beam_size=50, max_len_b=1, search_strategy=strategy)
    for _ in range(40):
        for hypothesis in sampler(sample)[0]:
            counts[hypothesis["tokens"][0]] += 1
    distance = (counts / counts.sum() - expected / expected.sum()).abs().sum() / 2
    assert distance < 0.08


# Scoring


@pytest.mark.parametrize("softmax_batch", [None, 4, 7, 1])
@pytest.mark.parametrize("source", SOURCES, ids=" ".join)
@pytest.mark.parametrize("fusion", FUSIONS, ids=" ".join)
@torch.no_grad()
def test_scores_of_the_sequence_scorer_equal_a_full_pass(
    fusion: tuple[str, ...], source: tuple[str, ...], softmax_batch: int | None
) -> None:
    fused, plain, sample = shaken(*source, *fusion), shaken(arch="transformer", seed=2), batch()
    dictionary = tasks.setup_task(parse()).target_dictionary
    for models in ([fused], [fused, plain]):
        hypotheses = SequenceScorer(dictionary, softmax_batch=softmax_batch).generate(models, sample)
        each = torch.stack([log_probs(m, sample) for m in models])
        mean = each[0] if len(models) == 1 else each.exp().mean(0).log()
        picked = mean.gather(-1, sample["target"].unsqueeze(-1)).squeeze(-1)
        for i, (hypothesis,) in enumerate(hypotheses):
            expected = picked[i][sample["target"][i].ne(PAD)]
            torch.testing.assert_close(hypothesis["positional_scores"], expected, atol=1e-5, rtol=0)


# Alignment


@pytest.mark.parametrize(
    "flags", [(), ATT, ("--surfacefusion", "mean"), ("--layer-wise-attention", *ATT)], ids=" ".join
)
@pytest.mark.parametrize("name", ["", "_tiny", "_iwslt_de_en", "_wmt_en_de_big", "_vaswani_wmt_en_de_big"])
@torch.no_grad()
def test_alignments_of_every_architecture(name: str, flags: tuple[str, ...]) -> None:
    sizes = ("--decoder-embed-dim", "16", "--decoder-ffn-embed-dim", "24")
    model, sample = shaken(*sizes, *flags, arch=ARCH + name), batch((6, 3, 5), (4, 4, 4))
    _, extra = model(**sample["net_input"])
    (attn,) = extra["attn"]
    assert attn.shape == (3, 4, 6)
    torch.testing.assert_close(attn.sum(-1), torch.ones(3, 4))
    assert (
        attn.masked_select(sample["net_input"]["src_tokens"].eq(PAD)[:, None, :].expand_as(attn)) == 0
    ).all()
    dictionary = tasks.setup_task(parse()).target_dictionary
    aligner = SequenceGeneratorWithAlignment([model], dictionary, beam_size=2, max_len_b=6)
    for hypotheses in aligner.generate([model], sample):
        assert all(isinstance(pair, (list, tuple, Tensor)) for h in hypotheses for pair in h["alignment"])


def test_alignment_at_a_given_layer() -> None:
    model, net = shaken(*ATT, *HARD, "--decoder-layers", "3"), batch()["net_input"]
    last = model(**net)[1]["attn"][0]
    assert torch.equal(model(**net, alignment_layer=2)[1]["attn"][0], last)
    assert not torch.equal(model(**net, alignment_layer=0)[1]["attn"][0], last)
    one_head = model(**net, alignment_layer=2, alignment_heads=1)[1]["attn"][0]
    assert one_head.shape == last.shape and not torch.equal(one_head, last)


def test_shared_embeddings_need_one_dictionary() -> None:
    with pytest.raises(SurfaceFusionError, match=r"source has 64 entries and the target 60"):
        build(*ATT, SHARED, vocab=(64, 60))


# Training mode: torch walks over all modules each time, this model only where the mode changes


def modes(model: torch.nn.Module) -> set[bool]:
    return {module.training for module in model.modules()}


@pytest.mark.parametrize("flags", [(), (*ATT, *HARD), ("--sf-plain",), ("--encoder-layerdrop", "0.5")])
def test_train_and_eval_set_the_mode_of_all_modules(flags: tuple[str, ...]) -> None:
    model, _ = build(*flags)
    for mode in (True, False, False, True, True):
        assert model.train(mode) is model
        assert modes(model) == {mode}
    model.eval()
    assert modes(model) == {False}


@pytest.mark.parametrize("before", [True, False])
def test_train_resets_a_module_whose_mode_was_set_by_hand(before: bool) -> None:
    model, _ = build(*ATT, *HARD)
    model.train(before)
    model.decoder.layers[1].fc1.train(not before)
    model.train(before)
    assert modes(model) == {before}
    model.train(not before)
    model.decoder.layers[1].fc1.train(before)
    model.train(not before)
    assert modes(model) == {not before}


def test_the_mode_of_a_copy_is_independent() -> None:
    model, _ = build(*ATT, *HARD)
    model.train()
    twin = copy.deepcopy(model).eval()
    assert (modes(model), modes(twin)) == ({True}, {False})
    model.eval()
    twin.train()
    assert (modes(model), modes(twin)) == ({False}, {True})


def test_train_sets_the_mode_of_a_replaced_module() -> None:
    model, _ = build(*ATT, *HARD)
    model.train()
    model.encoder.layers[0].fc1 = torch.nn.Linear(16, 24)
    for mode in (False, True):
        model.train(mode)
        assert modes(model) == {mode}


@pytest.mark.parametrize("flags", [(*ATT, *HARD), ("--encoder-fusion", "dlcl"), ("--sf-plain",)])
def test_eval_sets_the_mode_of_an_added_module(flags: tuple[str, ...]) -> None:
    model, _ = build(*flags)
    model.eval()
    model.adapter = torch.nn.Dropout(0.5)
    assert model.adapter.training
    model.eval()
    assert modes(model) == {False}
    model.encoder.adapter = torch.nn.Dropout(0.5)
    model.eval()
    assert modes(model) == {False}


class Schedule(torch.nn.Module):
    updates, epoch = -1, -1

    def set_num_updates(self, num_updates: int) -> None:
        self.updates = num_updates

    def set_epoch(self, epoch: int) -> None:
        self.epoch = epoch


def test_submodules_receive_the_number_of_updates_and_epochs() -> None:
    model, _ = build(*ATT, *HARD)
    model.decoder.schedule, model.encoder.layers[1].schedule = Schedule(), Schedule()
    model.set_num_updates(7)
    model.set_epoch(3)
    for schedule in (model.decoder.schedule, model.encoder.layers[1].schedule):
        assert (schedule.updates, schedule.epoch) == (7, 3)


@pytest.mark.parametrize("flags", [(*ATT, *HARD), *(("--encoder-fusion", m) for m in ("dlcl", "dense"))])
@pytest.mark.parametrize("drop", ["0", "0.5"])
def test_a_replaced_layer_is_used(flags: tuple[str, ...], drop: str) -> None:
    flags = (*flags, "--encoder-layerdrop", drop, "--decoder-layerdrop", drop)
    model, other = shaken(*flags), shaken(*flags, seed=2)
    for stack in ("encoder", "decoder"):
        getattr(model, stack).layers[0] = getattr(other, stack).layers[0]
    expected = shaken(*flags)
    state = other.state_dict()
    moved = {n: v for n, v in state.items() if n.startswith(("encoder.layers.0.", "decoder.layers.0."))}
    expected.load_state_dict({**expected.state_dict(), **moved})
    assert torch.equal(log_probs(model, batch()), log_probs(expected, batch()))
    twin = copy.deepcopy(model)
    assert torch.equal(log_probs(twin, batch()), log_probs(expected, batch()))
