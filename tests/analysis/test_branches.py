"""What the branches say is what the fused distribution is made of."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from fairseq.data import Dictionary

from surface_fusion.analysis.branches import _source_ids, summary, tokens
from surface_fusion.analysis.loaded import Loaded
from surface_fusion.errors import SurfaceFusionError
from tests.helpers.tiny import SHARED, batch, build, log_probs, shaken

ATT = ("--surfacefusion", "att", SHARED)


class OneBatch(Loaded):
    def batches(self, max_tokens: int = 4000) -> Any:
        yield batch()


def loaded(*flags: str) -> Loaded:
    words = build(*flags)[1].target_dictionary
    task: Any = SimpleNamespace(source_dictionary=words, target_dictionary=words)
    return OneBatch(shaken(*flags), task, "test")


@pytest.mark.parametrize("gate", ["0.8", "0"])
def test_hard_fusion_is_the_weighted_mean_of_the_logs(gate: str) -> None:
    model = loaded(*ATT, "--sf-gate", gate)
    sample, found = batch(), list(tokens(model))
    assert len(found) == sample["ntokens"]
    full = log_probs(model.model, sample)
    for token in found:
        assert token.gate is not None and (gate == "0" or token.gate == pytest.approx(0.8))
        mean = token.p_target**token.gate * token.p_surface ** (1 - token.gate)
        assert token.p_fused == pytest.approx(mean, rel=1e-4)
        assert token.fused == int(full[token.sentence, token.position].argmax())
        assert token.decides == (token.fused != token.target)
        source = sample["net_input"]["src_tokens"][token.sentence].tolist()
        assert token.copies == (token.surface in source and token.surface > 3)
        assert token.reference == int(sample["target"][token.sentence, token.position])


def test_a_copy_is_of_the_word_not_of_its_number() -> None:
    """Dictionaries that are not joined; </s>, which every source ends in, is no word."""
    one, other = Dictionary(), Dictionary()
    for dictionary, words in ((one, "a b c"), (other, "x c a")):
        for word in words.split():
            dictionary.add_symbol(word)
    assert _source_ids(one, other).tolist() == [-1] * 4 + [-1, one.index("c"), one.index("a")]


@pytest.mark.parametrize("flags", [("--sf-mode", "soft"), ("--sf-gate", "0.7", "--sf-renormalize")], ids=str)
def test_modes_of_one_projection_are_taken_apart(flags: tuple[str, ...]) -> None:
    model = loaded(*ATT, *flags)
    found = list(tokens(model))
    full = log_probs(model.model, batch()).exp().detach()
    for token in found:
        assert token.p_fused == pytest.approx(
            float(full[token.sentence, token.position, token.reference]), rel=1e-4
        )
        assert (token.gate is None) == ("soft" in flags)
    assert "fuse" not in vars(model.model.decoder)


def test_summary() -> None:
    model = loaded(*ATT, "--sf-gate", "0.8")
    found = list(tokens(model))
    means = summary(found)
    assert means["tokens"] == len(found) and means["gate"] == pytest.approx(0.8)
    right = torch.tensor([token.fused == token.reference for token in found]).float().mean()
    assert means["right_fused"] == pytest.approx(float(right))


def test_a_model_without_surface_says_so() -> None:
    with pytest.raises(SurfaceFusionError, match="no --surfacefusion, so it has no branches"):
        list(tokens(loaded(SHARED)))
