"""YAML configurations build the same model as flags, and errors name the key.

Tests ``config/flags.py`` and ``config/encoder_fusion_flags.py``.
"""

from typing import Any

import pytest
import torch
from fairseq import tasks
from omegaconf import OmegaConf, open_dict

from surface_fusion.errors import SurfaceFusionError
from tests.helpers.tiny import ARCH, batch, build, data_folder, log_probs, parse

ATT = ("--surfacefusion", "att")


def yaml_model(values: dict[str, Any], seed: int = 1) -> Any:
    """The model that ``fairseq-hydra-train`` builds from a config's ``model`` section."""
    cfg = OmegaConf.create({"model": {"_name": ARCH, **values}})
    OmegaConf.set_struct(cfg, True)
    task = tasks.setup_task(parse(data=data_folder()))
    torch.manual_seed(seed)
    return task.build_model(cfg.model)


FLAT = {
    "encoder_embed_dim": 16,
    "encoder_ffn_embed_dim": 24,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 2,
    "decoder_attention_heads": 2,
    "dropout": 0,
    "attention_dropout": 0,
}
NESTED = {
    "encoder": {"embed_dim": 16, "ffn_embed_dim": 24, "layers": 2, "attention_heads": 2},
    "decoder": {"layers": 2, "attention_heads": 2},
    "dropout": 0,
    "attention_dropout": 0,
}


@pytest.mark.parametrize("sizes", [FLAT, NESTED], ids=["flat", "nested"])
@pytest.mark.parametrize(
    ("values", "flags"),
    [
        ({}, ()),
        ({"surfacefusion": "att", "sf_gate": 0.8}, (*ATT, "--sf-gate", "0.8")),
        (
            {"surfacefusion": "att", "sf_ffn": False, "sf_no_posedemb": False, "sf_idx": -2},
            (*ATT, "--no-sf-ffn", "--sf-posedemb", "--sf-idx", "-2"),
        ),
        (
            {"surfacefusion": "att", "no_sf_ffn": True, "sf_posedemb": True, "sf_attention_heads": 4},
            (*ATT, "--no-sf-ffn", "--sf-posedemb", "--sf-attention-heads", "4"),
        ),
        (
            {"surfacefusion": "mean", "sf_mode": "soft", "sf_softmax_tau": 0.5, "share_all_embeddings": True},
            (
                "--surfacefusion",
                "mean",
                "--sf-mode",
                "soft",
                "--sf-softmax-tau",
                "0.5",
                "--share-all-embeddings",
            ),
        ),
        ({"layer_wise_attention": True}, ("--layer-wise-attention",)),
    ],
    ids=str,
)
def test_yaml_gives_the_model_of_the_flags(
    values: dict[str, Any], flags: tuple[str, ...], sizes: dict[str, Any]
) -> None:
    ours, theirs = yaml_model({**sizes, **values}), build(*flags)[0]
    assert ours.state_dict().keys() == theirs.state_dict().keys()
    for name, value in theirs.state_dict().items():
        if "_float_tensor" not in name:
            assert torch.equal(ours.state_dict()[name], value), name
    assert torch.equal(log_probs(ours.eval(), batch()), log_probs(theirs.eval(), batch()))


def test_a_yaml_section_completes_a_named_architecture() -> None:
    model = yaml_model({"_name": f"{ARCH}_tiny", "surfacefusion": "att", "decoder": {"layers": 1}})
    assert len(model.decoder.layers) == 1 and len(model.encoder.layers) == 4
    assert model.decoder.embed_dim == 128 and model.decoder.fc1.out_features == 256
    assert model.decoder.sf_attn.dropout_module.p == 0.1


def test_the_configuration_stored_by_a_yaml_run_builds_the_same_model() -> None:
    cfg = OmegaConf.create({"_name": ARCH, **NESTED, "surfacefusion": "att", "sf_ffn": False})
    task = tasks.setup_task(parse())
    shapes = {n: p.shape for n, p in task.build_model(cfg).named_parameters()}
    stored = OmegaConf.create(OmegaConf.to_container(cfg))
    assert {n: p.shape for n, p in task.build_model(stored).named_parameters()} == shapes
    assert stored == cfg


@pytest.mark.parametrize(
    ("values", "text"),
    [
        (
            {"sf_gat": 0.8},
            "model.sf_gat in the YAML config is not an option of this model; did you mean sf_gate?",
        ),
        ({"zzz": 1}, "model.zzz in the YAML config is not an option of this model; remove it"),
        (
            {"encoder": {"layer": 2}},
            "model.encoder_layer in the YAML config is not an option of this model; "
            "did you mean encoder_layers?",
        ),
    ],
    ids=str,
)
def test_a_misspelt_yaml_key_is_refused(values: dict[str, Any], text: str) -> None:
    with pytest.raises(SurfaceFusionError) as error:
        yaml_model({"surfacefusion": "att", **values})
    assert str(error.value) == text


def test_published_options_in_yaml_are_refused_too() -> None:
    with pytest.raises(SurfaceFusionError, match="addtional_source_output"):
        yaml_model({**FLAT, "addtional_source_output": "final"})


@pytest.mark.parametrize(
    "values", [{"sf_mode": "softest"}, {"sf_gate": 2}, {"surfacefusion": "dot"}], ids=str
)
def test_invalid_values_in_yaml_are_named(values: dict[str, Any]) -> None:
    with pytest.raises(SurfaceFusionError, match=str(next(iter(values.values())))):
        yaml_model({**FLAT, "surfacefusion": "att", **values})


def test_encoder_fusion_in_yaml() -> None:
    """fairseq takes names that begin with ``encoder_`` for a part of its section *encoder*."""
    cfg = yaml_model(
        {"encoder": {"layers": 3}, "encoder_fusion": "dwatt", "encoder_fusion_embedding": True}
    ).cfg
    assert (cfg.encoder_fusion, cfg.encoder_fusion_embedding, cfg.encoder.layers) == ("dwatt", True, 3)
    flat = yaml_model({"encoder_layers": 3, "transparent_attention": True, "fine_grained_ta": True}).cfg
    assert (flat.encoder_fusion, flat.encoder.layers) == ("fine-grained", 3)


def test_the_struct_flag_of_a_yaml_config_is_restored() -> None:
    cfg = OmegaConf.create({"_name": ARCH, **FLAT})
    OmegaConf.set_struct(cfg, True)
    tasks.setup_task(parse()).build_model(cfg)
    assert OmegaConf.is_struct(cfg)
    with open_dict(cfg):
        assert cfg.sf_ffn is True
