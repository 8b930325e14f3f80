"""26 tiny models of the published code, loaded as a user loads an old checkpoint, against its numbers.

Tolerances: 1e-4 on log-probabilities and scores; on gradients 1e-4 of the model's largest.
"""

from argparse import Namespace
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from torch import Tensor

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.upgrade_state_dict import PUBLISHED_LAYER_ATTENTION
from surface_fusion.ops.distributions import MODES
from surface_fusion.packed.batch import pack
from surface_fusion.packed.eligibility import why_not_fused, why_not_packed
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.step import PackedStep
from surface_fusion.packed.transformer import PackedTransformer
from tests.helpers.published import (
    GOLDEN_NAMES,
    LABEL_SMOOTHING,
    PAD,
    Golden,
    assert_near,
    load_golden,
    losses,
    write_checkpoint,
)

TRANSPARENT = ("ta", "ta_fine_srcemb", "ta_srcemb_ffn_posedemb_prenorm")
VANILLA = ("vanilla", "vanilla_layerwise")


def args_of_plain_model(name: str) -> dict[str, Any]:
    """The published code crashes without ``--surfacefusion``: its plain models were run with gate 1."""
    return {"surfacefusion": None} if name in (*VANILLA, *TRANSPARENT) else {}


def our_name(name: str) -> str:
    """What the published parameter *name* is called here."""
    for old, new in PUBLISHED_LAYER_ATTENTION.items():
        if name.startswith(old):
            return new + name[len(old) :]
    return name


@dataclass(frozen=True)
class Loaded:
    golden: Golden
    model: Any
    task: Any
    mode: str | None
    """The mode of fusion, None for a plain Transformer."""

    @property
    def grad(self) -> dict[str, Tensor]:
        """The published gradients by our names."""
        return {our_name(name): grad for name, grad in self.golden.grad.items()}

    def forward(self) -> tuple[Any, Tensor]:
        """The model's output for the golden batch, and its log-probabilities."""
        net_output = self.model(**self.golden.net_input)
        return net_output, self.model.get_normalized_probs(net_output, log_probs=True)


@pytest.fixture(scope="module", params=GOLDEN_NAMES)
def loaded(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Loaded:
    golden = load_golden(request.param)
    plain = args_of_plain_model(golden.name)
    path = write_checkpoint(golden, tmp_path_factory.mktemp(golden.name), **plain)
    (model,), _, task = load_model_ensemble_and_task([str(path)])
    return Loaded(golden, model.eval(), task, None if plain else golden.meta["args"]["sf_mode"])


def test_all_26_models_exist() -> None:
    assert len(GOLDEN_NAMES) == 26


def test_log_probs_and_losses(loaded: Loaded) -> None:
    golden = loaded.golden
    with torch.no_grad():
        log_probs = loaded.forward()[1]
    assert_near(log_probs, golden["log_probs"])
    loss, nll = losses(log_probs, golden["target"])
    assert_near(loss, golden["loss"])
    assert_near(nll, golden["nll_loss"])


def test_logits_and_gate(loaded: Loaded) -> None:
    golden, vocab = loaded.golden, loaded.golden.meta["n_tgt"]
    with torch.no_grad():
        logits = loaded.forward()[0][0]
    if loaded.mode is None:
        assert_near(logits, golden["tgt_logits"])
    elif loaded.mode in ("hard", "postnorm_v1"):
        assert_near(logits[..., :vocab], golden["tgt_logits"])
        assert_near(logits[..., vocab : 2 * vocab], golden["src_logits"])
    else:
        tau = MODES[loaded.mode].scale(golden.meta["args"]["sf_softmax_tau"])
        assert_near(logits, golden["tgt_logits"] + tau * golden["src_logits"])
    if loaded.mode == "hard" and golden.meta["args"]["sf_gate"] == 0:
        assert_near(logits[..., 2 * vocab : 2 * vocab + 1], golden["gate"])


def test_surface_vectors(loaded: Loaded) -> None:
    golden = loaded.golden
    if loaded.mode is None and golden.meta["args"]["ta_posedemb"]:
        return  # not read: see the model as the published code ran it
    with torch.no_grad():
        encoder_out = loaded.model.encoder(golden["src_tokens"], golden["src_lengths"])
    pooled = {"mean": "src_mean_emb", "max": "src_max_emb"}.get(golden.meta["args"]["surfacefusion"])
    expected = golden["encoder_embedding"] if pooled is None else golden[pooled].unsqueeze(1)
    assert_near(encoder_out["encoder_embedding"][0], expected)


def test_gradients(loaded: Loaded) -> None:
    golden, model = loaded.golden, loaded.model
    model.zero_grad()
    losses(loaded.forward()[1], golden["target"])[0].backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    assert grads.keys() == loaded.grad.keys()
    largest = max(grad.abs().max().item() for grad in loaded.grad.values())
    for name, grad in loaded.grad.items():
        assert_near(grads[name], grad, 1e-4 * largest, name)


def test_gradients_of_the_packed_step(loaded: Loaded) -> None:
    """Losses and gradients of the packed forward with output layer and loss in one."""
    golden, model = loaded.golden, loaded.model
    if why_not_fused(model) is not None:
        assert loaded.mode == "postnorm_v1"
        return
    flat = FlatParameters.of(model.parameters())
    assert why_not_packed(model) is None
    flat.zero_grad()
    packed = PackedTransformer(model, flat)
    vocab = golden.meta["n_tgt"]
    # fairseq 0.9 gave the target's own part of epsilon to it once more.
    step = PackedStep(packed, LABEL_SMOOTHING * (vocab - 1) / vocab, ignore_prefix_size=0)
    packed.training = False  # no dropout
    batch = pack(*(golden[name] for name in ("src_tokens", "prev_output_tokens", "target")), PAD)
    found, backward = step.forward(batch)
    assert_near(found.loss, golden["loss"])
    assert_near(found.nll, golden["nll_loss"])
    backward(torch.tensor(1.0))
    largest = max(grad.abs().max().item() for grad in loaded.grad.values())
    for name, parameter in model.named_parameters():
        if parameter.requires_grad:
            assert_near(parameter.grad, loaded.grad[name], 1e-4 * largest, name)


def test_no_parameter_is_unused(loaded: Loaded) -> None:
    golden = loaded.golden
    unused = {*golden.meta["grad_none"], *golden.unused_param}
    names = {name for name, parameter in loaded.model.named_parameters() if parameter.requires_grad}
    assert unused
    assert names == loaded.grad.keys()
    assert not names & unused


def test_incremental_decoding_equals_full_pass(loaded: Loaded) -> None:
    golden, model = loaded.golden, loaded.model
    prev_output_tokens = golden["prev_output_tokens"]
    incremental_state: dict[str, Any] = {}
    steps = []
    with torch.no_grad():
        full = loaded.forward()[1]
        encoder_out = model.encoder(golden["src_tokens"], golden["src_lengths"])
        for length in range(1, prev_output_tokens.size(1) + 1):
            net_output = model.decoder(
                prev_output_tokens[:, :length], encoder_out=encoder_out, incremental_state=incremental_state
            )
            steps.append(model.get_normalized_probs(net_output, log_probs=True))
    log_probs = torch.cat(steps, dim=1)
    tokens = golden["target"] != PAD
    assert_near(log_probs[tokens], golden["inc_log_probs"][tokens])
    assert_near(log_probs[tokens], full[tokens])


def test_beam_search(loaded: Loaded) -> None:
    golden, settings = loaded.golden, dict(loaded.golden.meta["beam"])
    beam = settings.pop("beam_size")
    generator = loaded.task.build_generator([loaded.model], Namespace(beam=beam, **settings))
    n_best = loaded.task.inference_step(generator, [loaded.model], {"net_input": golden.net_input})
    assert len(n_best) == len(golden["beam_tokens"])
    for hypotheses, tokens, lengths, scores, positional in zip(
        n_best,
        golden["beam_tokens"],
        golden["beam_lengths"],
        golden["beam_scores"],
        golden["beam_pos_scores"],
        strict=True,
    ):
        assert len(hypotheses) == beam
        assert_near(torch.stack([h["score"] for h in hypotheses]), scores.float())
        if loaded.mode == "postnorm_v1":
            continue  # nearly uniform: the order of its hypotheses hangs on the last bit
        for i, (hypothesis, length) in enumerate(zip(hypotheses, lengths.tolist(), strict=True)):
            assert hypothesis["tokens"].tolist() == tokens[i, :length].tolist()
            assert_near(hypothesis["positional_scores"], positional[i, :length])


@pytest.mark.parametrize("name", [*VANILLA, *TRANSPARENT])
@pytest.mark.slow
def test_plain_model_with_the_published_settings(name: str, tmp_path: Path) -> None:
    """Surface attention with gate 1: another model, whose surface branch has weight 0."""
    golden = load_golden(name)
    (model,), _, _ = load_model_ensemble_and_task([str(write_checkpoint(golden, tmp_path))])
    model.eval()
    encoder_out = model.encoder(golden["src_tokens"], golden["src_lengths"])
    assert_near(encoder_out["encoder_embedding"][0], golden["encoder_embedding"])
    log_probs = model.get_normalized_probs(model(**golden.net_input), log_probs=True)
    assert_near(log_probs, golden["log_probs"])
    losses(log_probs, golden["target"])[0].backward()
    grads = {our_name(parameter): grad for parameter, grad in golden.grad.items()}
    largest = max(grad.abs().max().item() for grad in golden.grad.values())
    for parameter_name, parameter in model.named_parameters():
        if parameter.requires_grad:
            expected = grads.get(parameter_name, torch.zeros_like(parameter))
            assert_near(parameter.grad, expected, 1e-4 * largest, parameter_name)


@pytest.mark.parametrize("share_decoder", [True, False])
@pytest.mark.slow
def test_unshared_embeddings(share_decoder: bool, tmp_path: Path) -> None:
    """The same numbers when each matrix is stored on its own; the output's was called ``embed_out``."""
    golden = load_golden("att_hard_g08")
    if not share_decoder:
        golden.param["decoder.embed_out"] = golden.param["decoder.embed_tokens.weight"]
    path = write_checkpoint(
        golden,
        tmp_path,
        share_all_embeddings=False,
        share_decoder_input_output_embed=share_decoder,
    )
    (model,), _, _ = load_model_ensemble_and_task([str(path)])
    decoder = model.decoder
    assert decoder.embed_tokens.weight is not model.encoder.embed_tokens.weight
    assert (decoder.output_projection.weight is decoder.embed_tokens.weight) == share_decoder
    with torch.no_grad():
        log_probs = model.eval().get_normalized_probs(model(**golden.net_input), log_probs=True)
    assert_near(log_probs, golden["log_probs"])


@pytest.mark.slow
def test_a_surface_with_positions_is_layer_0_of_layer_attention_too(tmp_path: Path) -> None:
    """As the published code computed; no command line of it could ask for that."""
    golden = load_golden("ta_fine_srcemb_att_hard_g08")
    path = write_checkpoint(golden, tmp_path, sf_no_posedemb=False)
    (model,), _, _ = load_model_ensemble_and_task([str(path)])
    assert model.encoder.cfg.ta_posedemb
    assert not model.encoder.cfg.sf_no_posedemb


def test_positions_without_the_norm_of_the_embedding_are_refused(tmp_path: Path) -> None:
    golden = load_golden("ta_srcemb_ffn_posedemb_prenorm")
    path = write_checkpoint(golden, tmp_path, layernorm_embedding=True)
    with pytest.raises(SurfaceFusionError, match="--ta-posedemb and --layernorm-embedding"):
        load_model_ensemble_and_task([str(path)])
