"""Models trained with LayerDrop, loaded with fewer layers."""

import copy
import itertools
from typing import Any

import pytest
import torch
from fairseq import tasks
from fairseq.modules import LayerDropModuleList
from omegaconf import OmegaConf

from surface_fusion.config.layers_to_keep import normalise_layers_to_keep
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.modules.layerdrop import skip_decoder_layer, skip_encoder_layer
from tests.helpers.tiny import ARCH, SIZES, batch, build, log_probs, parse, shaken

ATT = ("--surfacefusion", "att")
DEEP = ("--encoder-layers", "4", "--decoder-layers", "4")


@pytest.mark.parametrize("given", ["0,2,3", [3, 0, 2], "3,0,2"], ids=str)
@pytest.mark.parametrize(("idx", "settled"), [(None, None), (3, 2), (-1, 2), (2, 1), (1, 0), (0, 0), (-3, 0)])
def test_sf_idx_keeps_its_meaning(given: Any, idx: int | None, settled: int | None) -> None:
    args = parse(*ATT, *DEEP)
    args.decoder_layers_to_keep, args.sf_idx = given, idx
    for _ in range(2):
        normalise_layers_to_keep(args)
        assert (args.decoder_layers, args.encoder_layers) == (3, 4)
        assert args.decoder_layers_to_keep == "0,2,3"
        assert args.sf_idx == settled


@pytest.mark.parametrize(
    ("flags", "encoder", "decoder"),
    [
        ((), (0, 3), (1, 3)),
        ((), (0, 2), ()),
        ((), (), (0, 2)),
        (("--sf-idx", "2"), (0, 1, 2, 3), (0, 2, 3)),
        (("--sf-idx", "1"), (1, 2), (0, 2, 3)),
        (("--sf-idx", "-1", "--sf-no-detach"), (2,), (1,)),
        (("--layer-wise-attention",), (0, 3), (0, 3)),
    ],
    ids=str,
)
def test_a_pruned_model_is_the_full_one_with_layers_passed_by(
    flags: tuple[str, ...], encoder: tuple[int, ...], decoder: tuple[int, ...]
) -> None:
    full, sample = shaken(*ATT, *DEEP, *flags), batch()
    keeps = {"encoder": encoder, "decoder": decoder}
    for stack, keep in keeps.items():
        if keep:
            flags += (f"--{stack}-layers-to-keep", ",".join(map(str, keep)))
    args = parse(*SIZES, *ATT, *DEEP, *flags)
    pruned = tasks.setup_task(args).build_model(args)
    pruned.load_state_dict(copy.deepcopy(full.state_dict()), model_cfg=args)
    encoder, decoder = encoder or (0, 1, 2, 3), decoder or (0, 1, 2, 3)  # a stack not mentioned stays whole
    assert (len(pruned.encoder.layers), len(pruned.decoder.layers)) == (len(encoder), len(decoder))

    def passing_by(layers: Any, keep: tuple[int, ...], skip: Any) -> Any:
        out = LayerDropModuleList(0.0)
        out.eval()
        real = list(layers)
        chosen = [real[i] if i in keep else skip for i in range(4)]
        out.__class__ = type("Chosen", (LayerDropModuleList,), {"__iter__": lambda self: iter(chosen)})
        return out

    full.encoder.layers = passing_by(full.encoder.layers, encoder, skip_encoder_layer)
    full.decoder.layers = passing_by(full.decoder.layers, decoder, skip_decoder_layer)
    torch.testing.assert_close(log_probs(pruned.eval(), sample), log_probs(full, sample), atol=1e-5, rtol=0)


def test_what_is_stored_after_pruning_loads_again() -> None:
    """fairseq empties the flags once the parameters are pruned; sizes and sf_idx must hold without them."""
    full = shaken(*ATT, *DEEP, "--sf-idx", "2")
    args = parse(*SIZES, *ATT, *DEEP, "--sf-idx", "2", "--decoder-layers-to-keep", "0,2")
    task = tasks.setup_task(args)
    pruned = task.build_model(args)
    pruned.load_state_dict(full.state_dict(), model_cfg=args)
    assert args.decoder_layers_to_keep is None and args.decoder_layers == 2 and args.sf_idx == 1
    again = task.build_model(args)
    again.load_state_dict(pruned.state_dict(), model_cfg=args)
    assert torch.equal(log_probs(again.eval(), batch()), log_probs(pruned.eval(), batch()))


def test_pruning_from_yaml() -> None:
    cfg = OmegaConf.create(
        {"_name": ARCH, "surfacefusion": "att", "encoder_embed_dim": 16, "encoder": {"layers_to_keep": "1,3"}}
    )
    model = tasks.setup_task(parse()).build_model(cfg)
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (2, 6)


def test_a_plain_transformer_can_be_pruned_too() -> None:
    model, _ = build(*DEEP, "--encoder-layers-to-keep", "1,2,3", "--decoder-layers-to-keep", "0")
    assert (len(model.encoder.layers), len(model.decoder.layers)) == (3, 1)


@pytest.mark.parametrize(
    ("flags", "text"),
    [
        (
            ("--decoder-layers-to-keep", "1,4,5"),
            "[1, 4, 5] names a layer that does not exist; choose from 0 to 3",
        ),
        (("--encoder-layers-to-keep", "0,9"), "--encoder-layers-to-keep [0, 9] names a layer"),
        (("--decoder-layers-to-keep", "2,3", "--sf-idx", "1"), "[2, 3] keeps no layer up to --sf-idx 1"),
        (("--decoder-layers-to-keep", "2,3", "--layer-wise-attention"), "pairs the layers, but"),
    ],
)
def test_impossible_pruning_is_named(flags: tuple[str, ...], text: str) -> None:
    with pytest.raises(SurfaceFusionError) as error:
        build(*ATT, *DEEP, *flags)
    assert text in str(error.value)


def test_every_pair_of_kept_layers_builds() -> None:
    for keep in itertools.combinations(range(4), 2):
        model, _ = build(*ATT, *DEEP, "--decoder-layers-to-keep", ",".join(map(str, keep)))
        assert model.decoder.query_depth == 2
