"""Which parameters of a checkpoint fit a model, and what is said about those that do not."""

import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from omegaconf import OmegaConf
from torch import Tensor

from surface_fusion.errors import SurfaceFusionError
from tests.helpers.tiny import SIZES, batch, build, log_probs, parse, shaken

ATT = ("--surfacefusion", "att", "--sf-gate", "0.8")
LEARNED = ("--surfacefusion", "att", "--sf-gate", "0")
FUSION = {
    *(f"decoder.sf_attn.{p}_proj.{kind}" for p in ("q", "k", "v", "out") for kind in ("weight", "bias")),
    *(f"decoder.fc{i}.{kind}" for i in (1, 2) for kind in ("weight", "bias")),
}
UNUSED = {
    "decoder.meanmaxweight": (1, 32),
    "decoder.tgt_out_dim.weight": (16, 16),
    "decoder.src_out_dim.weight": (16, 16),
}


def published(flags: tuple[str, ...]) -> dict[str, Tensor]:
    """The state of a trained model as the published code stores it, with what it never uses."""
    state = {name: value.clone() for name, value in shaken(*flags).state_dict().items()}
    return {**{name: torch.randn(shape) for name, shape in UNUSED.items()}, **state}


def load(flags: tuple[str, ...], state: dict[str, Tensor]) -> Any:
    model, _ = build(*flags, seed=9)
    model.load_state_dict(state)
    return model.eval()


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.name == "surface_fusion.models.upgrade_state_dict"]


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)


@pytest.mark.parametrize(
    "flags",
    [
        (),
        ATT,
        LEARNED,
        (*ATT, "--sf-linear"),
        ("--surfacefusion", "mean", "--sf-mode", "soft", "--no-sf-ffn"),
        ("--layer-wise-attention", *LEARNED, "--share-all-embeddings"),
    ],
    ids=" ".join,
)
def test_a_checkpoint_of_the_same_flags_loads_without_a_message(
    flags: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    trained = shaken(*flags)
    loaded = load(flags, dict(trained.state_dict()))
    assert torch.equal(log_probs(loaded, batch()), log_probs(trained, batch()))
    assert lines(caplog) == []


def test_unused_published_parameters_are_dropped_with_one_line(
    caplog: pytest.LogCaptureFixture,
) -> None:
    state = published(ATT)
    loaded = load(ATT, state)
    assert torch.equal(log_probs(loaded, batch()), log_probs(shaken(*ATT), batch()))
    assert lines(caplog) == [
        "dropped 3 parameters that the published code allocated but this model never uses "
        f"({', '.join(UNUSED)}); to continue training from this checkpoint, add --reset-optimizer"
    ]


@pytest.mark.parametrize("source", ["mean", "max"])
def test_the_unused_attention_of_published_pooled_models_is_dropped(
    source: str, caplog: pytest.LogCaptureFixture
) -> None:
    flags = ("--surfacefusion", source, "--sf-gate", "0.8")
    state = published(ATT)
    loaded = load(flags, dict(state))
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, state[name]), name
    (line,) = lines(caplog)
    assert line.startswith("dropped 11 parameters") and "decoder.sf_attn.q_proj.weight" in line


def test_published_parameters_that_are_used_are_kept() -> None:
    flags = (*LEARNED, "--sf-linear")
    state = published(LEARNED)
    loaded = load(flags, dict(state))
    for name in UNUSED:
        assert torch.equal(loaded.state_dict()[name], state[name])


@pytest.mark.parametrize("flags", [ATT, (*LEARNED, "--sf-linear")], ids=" ".join)
def test_a_plain_checkpoint_keeps_the_initial_fusion_parameters(
    flags: tuple[str, ...], caplog: pytest.LogCaptureFixture
) -> None:
    plain = shaken(arch="transformer").state_dict()
    fresh, _ = build(*flags, seed=9)
    loaded = load(flags, dict(plain))
    names = FUSION | (set(UNUSED) if flags is not ATT else set())
    as_plain = {"decoder.fc2.weight": torch.zeros(16, 24), "decoder.tgt_out_dim.weight": torch.eye(16)}
    expected = {**plain, **{name: fresh.state_dict()[name] for name in names}, **as_plain}
    for name, value in loaded.state_dict().items():
        assert torch.equal(value, expected[name]), name
    (line,) = lines(caplog)
    assert line.startswith(f"the checkpoint has no surface fusion: {len(names)} fusion parameters keep their")
    assert all(name in line for name in names)


def test_a_fused_checkpoint_in_a_plain_model_logs_a_message(caplog: pytest.LogCaptureFixture) -> None:
    load((), published(ATT))
    (line,) = lines(caplog)
    assert line.startswith(f"dropped {len(FUSION | set(UNUSED))} fusion parameters (")
    assert line.endswith("give the flags that the checkpoint was trained with")
    assert caplog.records[-1].levelno == logging.WARNING


@pytest.mark.parametrize("name", sorted(FUSION))
def test_a_missing_fusion_parameter_is_named(name: str, caplog: pytest.LogCaptureFixture) -> None:
    state = published(ATT)
    del state[name]
    with pytest.raises(SurfaceFusionError) as error:
        load(ATT, state)
    text = f"the checkpoint lacks the fusion parameters {name}; give the flags that it was trained with"
    assert str(error.value) == text == lines(caplog)[-1]


def test_flags_that_need_untrained_parameters_are_named() -> None:
    state = dict(shaken(*ATT).state_dict())
    with pytest.raises(
        SurfaceFusionError, match=r"lacks the fusion parameters decoder\.tgt_out_dim\.weight, dec"
    ):
        load((*ATT, "--sf-linear"), state)
    with pytest.raises(SurfaceFusionError, match=r"lacks the fusion parameters decoder\.meanmaxweight;"):
        load(LEARNED, dict(shaken(*ATT).state_dict()))
    pooled = ("--surfacefusion", "mean", "--sf-gate", "0.8")
    with pytest.raises(SurfaceFusionError, match=r"lacks the fusion parameters decoder\.sf_attn\."):
        load(ATT, dict(shaken(*pooled).state_dict()))


@pytest.mark.parametrize(
    "name", ["decoder.sf_attn.v_proj.weight", "decoder.fc1.bias", "encoder.layers.0.fc1.weight"]
)
def test_a_mismatched_shape_is_named(name: str) -> None:
    state = published(ATT)
    right = tuple(state[name].shape)
    state[name] = torch.zeros(3, 5)
    with pytest.raises(SurfaceFusionError) as error:
        load(ATT, state)
    assert str(error.value).startswith(
        f"parameter {name} has shape (3, 5) in the checkpoint and {right} in the model; give the flags"
    )


@pytest.mark.parametrize(
    ("vocab", "text"),
    [
        (
            (70, 64),
            "the source dictionary has 64 entries but the checkpoint was trained with 70; use the data",
        ),
        (
            (64, 70),
            "the target dictionary has 64 entries but the checkpoint was trained with 70; use the data",
        ),
    ],
)
@pytest.mark.parametrize("flags", [(), ATT], ids=" ".join)
def test_another_dictionary_is_named_with_both_sizes(
    vocab: tuple[int, int], text: str, flags: tuple[str, ...]
) -> None:
    state = dict(shaken(*flags, vocab=vocab).state_dict())
    with pytest.raises(SurfaceFusionError) as error:
        load(flags, state)
    assert str(error.value).startswith(text)


def test_missing_parameters_of_the_plain_part_are_reported_by_torch() -> None:
    state = dict(shaken(*ATT).state_dict())
    del state["encoder.layers.0.fc1.weight"]
    with pytest.raises(RuntimeError, match=r"Missing key.*encoder\.layers\.0\.fc1\.weight"):
        load(ATT, state)


def save(path: Path, model: Any, flags: tuple[str, ...]) -> str:
    """What fairseq's trainer stores of a model trained with *flags*."""
    cfg = convert_namespace_to_omegaconf(parse(*SIZES, *flags))
    state = {
        "args": None,
        "cfg": OmegaConf.to_container(cfg, resolve=True, enum_to_str=True),
        "model": model.state_dict(),
        "optimizer_history": [{"optimizer_name": "FairseqAdam", "lr_scheduler_state": {}, "num_updates": 1}],
        "extra_state": {"train_iterator": {"epoch": 1}},
    }
    torch.save(state, path)
    return str(path)


@pytest.mark.parametrize("flags", [ATT, (*LEARNED, "--layer-wise-attention"), ()], ids=" ".join)
def test_a_saved_model_is_loaded_unchanged(flags: tuple[str, ...], tmp_path: Path) -> None:
    trained = shaken(*flags)
    (loaded,), _, _ = load_model_ensemble_and_task([save(tmp_path / "checkpoint.pt", trained, flags)])
    assert torch.equal(log_probs(loaded.eval(), batch()), log_probs(trained, batch()))


def test_overrides_change_the_stored_settings(tmp_path: Path) -> None:
    path = save(tmp_path / "checkpoint.pt", shaken(*ATT), ATT)
    (loaded,), _, _ = load_model_ensemble_and_task([path], {"sf_gate": 0.5, "sf_idx": 0})
    expected = shaken("--surfacefusion", "att", "--sf-gate", "0.5", "--sf-idx", "0")
    assert torch.equal(log_probs(loaded.eval(), batch()), log_probs(expected, batch()))


def test_a_checkpoint_is_pruned_when_it_is_loaded(tmp_path: Path) -> None:
    flags = (*ATT, "--encoder-layers", "3", "--decoder-layers", "3")
    trained = shaken(*flags)
    path = save(tmp_path / "checkpoint.pt", trained, flags)
    (loaded,), _, _ = load_model_ensemble_and_task([path], {"decoder_layers_to_keep": "0,2"})
    assert (len(loaded.encoder.layers), len(loaded.decoder.layers)) == (3, 2)
    assert torch.equal(loaded.decoder.layers[1].fc1.weight, trained.decoder.layers[2].fc1.weight)


@pytest.mark.parametrize(
    "trained, wanted, name",
    [
        (ATT, (*ATT, "--no-sf-ffn"), "decoder.fc1.weight"),
        ((*ATT, "--sf-linear"), ATT, "decoder.tgt_out_dim.weight"),
        (ATT, ("--surfacefusion", "mean", "--sf-gate", "0.8"), "decoder.sf_attn.q_proj.weight"),
    ],
    ids=["ffn", "linear", "attention"],
)
def test_trained_parameters_are_not_dropped(
    trained: tuple[str, ...], wanted: tuple[str, ...], name: str
) -> None:
    state = dict(shaken(*trained).state_dict())
    with pytest.raises(SurfaceFusionError, match=f"fusion parameters that this model does not use.*{name}"):
        load(wanted, state)


TA_FFN = ("--encoder-fusion", "transparent", "--ta-ffn", "--encoder-normalize-before")


def test_pre_norm_ta_ffn_of_version_0_1_0_is_refused_in_one_line(caplog: pytest.LogCaptureFixture) -> None:
    """Its LayerNorm came after the feed-forward layer: the same names, another function."""
    state = shaken(*TA_FFN).state_dict()
    load(TA_FFN, dict(state))
    old = {name: value for name, value in state.items() if name != "encoder.fusion.ffn_norm_first"}
    assert len(old) == len(state) - 1
    with pytest.raises(SurfaceFusionError, match=r"trained by surface-fusion 0\.1\.0 with --ta-ffn and"):
        load(TA_FFN, old)


def test_post_norm_ta_ffn_of_version_0_1_0_loads() -> None:
    """Nothing has changed there, nor in the names."""
    flags = TA_FFN[:-1]
    model = shaken(*flags)
    names = {name for name in model.state_dict() if name.startswith("encoder.fusion.")}
    assert "encoder.fusion.ffn_norm_first" not in names
    assert {"encoder.fusion.fc1.weight", "encoder.fusion.ffn_norm.weight"} < names
    torch.testing.assert_close(
        log_probs(load(flags, model.state_dict()).eval(), batch()), log_probs(model, batch())
    )


def test_ta_ffn_starts_from_a_plain_pre_norm_checkpoint() -> None:
    model = load(TA_FFN, shaken("--encoder-normalize-before").state_dict())
    assert model.encoder.fusion.ffn_norm_first
