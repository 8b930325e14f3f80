"""Text that holds special symbols as words: every way computes what fairseq's modules do, in float64."""

from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.multiprocessing
from fairseq.criterions.label_smoothed_cross_entropy import LabelSmoothedCrossEntropyCriterion
from fairseq.data import language_pair_dataset

from surface_fusion.criterions.fused_label_smoothed_cross_entropy import (
    FusedLabelSmoothedCrossEntropyCriterion,
)
from surface_fusion.encoder_fusion import methods
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.literal_padding import KEY, in_target, mark
from tests.helpers import warm_processes
from tests.helpers.tiny import EOS, PAD, build, incremental_log_probs, log_probs, shaken

BOS, UNK = 0, 3
HARD = ("--surfacefusion", "att", "--sf-gate", "0.8")
MODELS = {
    "plain": (),
    "hard": HARD,
    "learned gate": ("--surfacefusion", "att"),
    "soft": ("--surfacefusion", "att", "--sf-mode", "soft"),
    "mean": ("--surfacefusion", "mean", "--sf-gate", "0.6"),
    "max": ("--surfacefusion", "max", "--sf-gate", "0.6"),
    "published max": ("--surfacefusion", "max", "--sf-gate", "0.6", "--sf-pool-published"),
    "with positions": (*HARD, "--sf-posedemb"),
    "learned positions": (*HARD, "--encoder-learned-pos", "--decoder-learned-pos"),
    "pre-norm": (*HARD, "--encoder-normalize-before", "--decoder-normalize-before"),
    **{name: ("--encoder-fusion", name, "--ta-dropout", "0") for name in methods()},
}
WORDS = [[4, 5, 6, 7, 8], [9, 10, 11], [12, 13, 14, 15]]
PLACES = {
    "source": ({0: [4, PAD, 6, 7, 8]}, {}),
    "start and end of a source": ({0: [PAD, 5, 6, 7, PAD], 1: [PAD, PAD, 11]}, {}),
    "target": ({}, {0: [4, 5, PAD, 7, 8]}),
    "start of a target": ({}, {1: [PAD, 10, 11]}),
    "end of a target": ({}, {2: [12, 13, 14, PAD], 1: [9, PAD, PAD]}),
    "nothing else": ({1: [PAD]}, {0: [PAD]}),
    "both": ({0: [4, PAD, 6, 7, 8]}, {0: [4, PAD, PAD, 7, 8], 2: [PAD, 13, 14, 15]}),
    "other symbols": ({0: [4, BOS, EOS, UNK, 8]}, {0: [EOS, 5, BOS, UNK, 8], 1: [UNK, EOS, EOS]}),
}


def collated(place: str, left_pad_target: bool = False) -> dict[str, Any]:
    """The batch of sentences with symbols at *place*, as fairseq's translation task makes it."""
    sides = [
        [torch.tensor([*changed.get(i, words), EOS]) for i, words in enumerate(WORDS)]
        for changed in PLACES[place]
    ]
    samples = [
        {"id": i, "source": src, "target": tgt} for i, (src, tgt) in enumerate(zip(*sides, strict=True))
    ]
    return language_pair_dataset.collate(samples, PAD, EOS, left_pad_target=left_pad_target)


def criteria(prefix: int = 0) -> tuple[Any, Any]:
    _, task = build()
    return (
        FusedLabelSmoothedCrossEntropyCriterion(task, False, 0.1, prefix),
        LabelSmoothedCrossEntropyCriterion(task, False, 0.1, prefix),
    )


def assert_as_plain(
    flags: tuple[str, ...], sample: dict[str, Any], packed: bool, train: bool, prefix: int = 0
) -> None:
    ours, plain = criteria(prefix)
    model, reference = (shaken(*flags).double().train(train) for _ in range(2))
    if packed:
        flat = FlatParameters.of(p for p in model.parameters() if p.requires_grad)
        flat.zero_grad()
    loss, size, logged = ours(model, sample)
    expected, expected_size, expected_log = plain(reference, sample)
    assert (ours.packed_step(model) is not None) == packed
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    assert size == expected_size
    for name in ("ntokens", "nsentences", "sample_size", "nll_loss", "loss"):
        assert float(logged[name]) == pytest.approx(float(expected_log[name]), rel=1e-6)
    if not train:
        return
    loss.backward()
    expected.backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        if p.requires_grad:
            torch.testing.assert_close(
                p.grad, torch.zeros_like(q) if q.grad is None else q.grad, rtol=1e-4, atol=2e-5, msg=name
            )


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("train", [True, False])
def test_special_symbols_within_sentences(place: str, packed: bool, train: bool) -> None:
    assert_as_plain(HARD, collated(place), packed, train)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("name", MODELS)
def test_padding_as_a_word_in_every_model(name: str, packed: bool) -> None:
    assert_as_plain(MODELS[name], collated("both"), packed, train=True)


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("place", ["both", "other symbols"])
def test_targets_padded_on_the_left(place: str, packed: bool) -> None:
    assert_as_plain(HARD, collated(place, left_pad_target=True), packed, train=True)


@pytest.mark.parametrize("packed", [True, False])
def test_an_ignored_prefix_counts_positions(packed: bool) -> None:
    assert_as_plain(HARD, collated("both"), packed, train=True, prefix=2)


def test_gradients_add_up_with_those_of_packed_batches() -> None:
    ours, plain = criteria()
    model, reference = (shaken(*HARD).double().train() for _ in range(2))
    FlatParameters.of(model.parameters()).zero_grad()
    for place, scale in (("other symbols", 2.0), ("both", 0.5), ("source", 1.0)):
        (scale * ours(model, collated(place))[0]).backward()
        (scale * plain(reference, collated(place))[0]).backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=1e-4, atol=2e-5, msg=name)


@pytest.mark.parametrize("place", PLACES)
def test_batches_whose_target_holds_padding_as_a_word_are_marked(place: str) -> None:
    batch = collated(place)
    holds = any(PAD in words for words in PLACES[place][1].values())
    assert in_target(batch, PAD) is holds
    mark(batch, PAD)
    assert batch[KEY] is holds
    assert in_target(batch, PAD) is holds


def test_a_batch_without_a_target_is_not_marked() -> None:
    samples = [{"id": 0, "source": torch.tensor([4, PAD, EOS]), "target": None}]
    batches: list[dict[str, Any]] = [language_pair_dataset.collate(samples, PAD, EOS), {}]
    for sample in batches:
        mark(sample, PAD)
        assert KEY not in sample


@pytest.mark.parametrize("name", ["hard", "mean", "max", "published max", "transparent", "dlcl", "plain"])
@pytest.mark.parametrize("place", ["source", "start and end of a source", "other symbols"])
def test_decoding_equals_that_of_the_modules(name: str, place: str) -> None:
    """Token by token, and by beam search."""
    sample = collated(place)
    model = shaken(*MODELS[name]).eval()
    plain = shaken(*MODELS[name], "--sf-plain").eval()
    task = build()[1]
    with torch.no_grad():
        real = sample["target"].ne(PAD)
        full = log_probs(plain, sample)
        for one in (model, plain):
            torch.testing.assert_close(
                incremental_log_probs(one, sample)[real], full[real], atol=2e-5, rtol=1e-5
            )
    found = []
    for one in (model, plain):
        generator = task.build_generator([one], Namespace(beam=3, max_len_a=0, max_len_b=12))
        hypotheses = task.inference_step(generator, [one], {"net_input": dict(sample["net_input"])})
        found.append([[h["tokens"].tolist() for h in n_best] for n_best in hypotheses])
    assert found[0] == found[1]


def test_fairseq_encodes_the_word_pad_as_the_symbol() -> None:
    """fairseq's dictionary takes the word for the symbol."""
    line = build()[1].target_dictionary.encode_line("w4 <pad> w5", add_if_not_exist=False)
    assert line.tolist() == [4, PAD, 5, EOS]


def _one_of_two_processes(rank: int, store: str, out: str) -> None:
    torch.distributed.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=2)
    model = shaken(*HARD).double().train()
    flat = FlatParameters.of(model.parameters())
    flat.zero_grad()
    criterion = criteria()[0]
    criterion(model, collated("both" if rank == 0 else "other symbols"))[0].backward()
    flat.average_grads(None)
    torch.save({name: p.grad.clone() for name, p in model.named_parameters()}, f"{out}/{rank}.pt")
    torch.distributed.destroy_process_group()


@pytest.mark.slow
def test_one_of_two_processes_has_padding_as_a_word(tmp_path: Path) -> None:
    """Both communicate alike: the gradient is the mean of both batches'."""
    warm_processes.in_two(_one_of_two_processes, str(tmp_path / "store"), str(tmp_path))
    reference = shaken(*HARD).double().train()
    for place in ("both", "other symbols"):
        (criteria()[1](reference, collated(place))[0] / 2).backward()
    for rank in range(2):
        found = torch.load(tmp_path / f"{rank}.pt")
        for name, parameter in reference.named_parameters():
            torch.testing.assert_close(found[name], parameter.grad, rtol=1e-4, atol=2e-5, msg=name)
