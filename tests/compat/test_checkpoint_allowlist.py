"""What a checkpoint's objects and its configuration may name; nothing in a file runs."""

import contextlib
import copy
import gc
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from fairseq import checkpoint_utils, models, tasks, utils
from fairseq.data import Dictionary, data_utils, encoders
from fairseq.models import FairseqEncoderDecoderModel, register_model, register_model_architecture
from fairseq.models.transformer import TransformerConfig
from omegaconf import AnyNode, DictConfig, OmegaConf

from surface_fusion import SurfaceFusionError
from surface_fusion.averaging import average_checkpoints
from surface_fusion.compat.checkpoint_allowlist import MODELS, TASKS, check_configuration, refusals, trusted
from surface_fusion.compat.checkpoint_loading import TRUST_VARIABLE
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel
from tests.helpers.pickles import Touching, expression, pickled
from tests.helpers.published import load_golden, write_checkpoint
from tests.helpers.tiny import data_folder

# -- pickles ------------------------------------------------------------------------------------------

PLACES: dict[str, Callable[[dict[str, Any], object], object]] = {
    "args": lambda state, value: setattr(state["args"], "note", value),
    "cfg": lambda state, value: state.update(args=None, cfg={"model": value}),
    "model": lambda state, value: state["model"].update(note=value),
    "extra_state": lambda state, value: state["extra_state"].update(note=value),
    "optimizer_history": lambda state, value: state["optimizer_history"].append(value),
    "task_state": lambda state, value: state.update(task_state={"note": value}),
    "last_optimizer_state": lambda state, value: state["last_optimizer_state"].update(note=value),
    "of any name": lambda state, value: state.update(note=value),
}


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A checkpoint of the published code, with its dictionaries beside it."""
    return write_checkpoint(load_golden("vanilla"), tmp_path, arch="transformer_surface_fusion")


def rewrite(path: Path, change: Callable[[dict[str, Any]], object], zipped: bool = True) -> Path:
    """The checkpoint *path* after *change*."""
    state = torch.load(path, weights_only=True)
    change(state)
    torch.save(state, path, _use_new_zipfile_serialization=zipped)
    return path


@pytest.mark.parametrize("zipped", [True, False])
@pytest.mark.parametrize("place", PLACES)
def test_no_pickle_in_a_checkpoint_runs(checkpoint: Path, tmp_path: Path, place: str, zipped: bool) -> None:
    marker = tmp_path / "marker"
    rewrite(checkpoint, lambda state: PLACES[place](state, Touching(marker)), zipped)
    with pytest.raises(SurfaceFusionError, match=r"code of posix\.system, .*--trust-checkpoint"):
        checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    assert not marker.exists()


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize("content", [b"", b"TNTIDX\x00\x00", b"MMIDIDX\x00\x00", b"HUFFIDX\x00\x00"])
@pytest.mark.parametrize("implementation", [None, "raw", "lazy", "cached", "mmap", "huffman", "fasta"])
def test_no_pickle_in_a_data_file_runs(tmp_path: Path, content: bytes, implementation: str | None) -> None:
    marker = tmp_path / "marker"
    for name in ("train.en", "train.en.idx", "train.en.bin", "train.en.vocab", "train.en.fasta"):
        (tmp_path / name).write_bytes(content + pickled(marker))
    (tmp_path / "train.en.fasta.idx.npy").write_bytes(b"\x93NUMPY" + pickled(marker))
    with contextlib.suppress(Exception):  # whatever the reader says
        loaded = data_utils.load_indexed_dataset(str(tmp_path / "train.en"), Dictionary(), implementation)
        _ = loaded and [loaded[i] for i in range(min(len(loaded), 3))]
    gc.collect()  # fairseq's half-built data sets fail once more when they go; not in the middle of something
    assert not marker.exists()


READERS: dict[str, Callable[[str], object]] = {
    "dictionary": Dictionary.load,
    "alignment": utils.load_align_dict,
    "embedding": utils.parse_embedding,
    "sentencepiece": lambda path: encoders.build_bpe(
        Namespace(bpe="sentencepiece", sentencepiece_model=path, sentencepiece_enable_sampling=False)
    ),
    "checkpoint": checkpoint_utils.load_checkpoint_to_cpu,
    "ema": checkpoint_utils.load_ema_from_checkpoint,
    "processor": lambda path: sentencepiece.SentencePieceProcessor(model_file=path),
}


@pytest.mark.parametrize("reader", READERS)
def test_no_pickle_in_a_file_of_another_kind_runs(tmp_path: Path, reader: str) -> None:
    marker, path = tmp_path / "marker", tmp_path / "file"
    path.write_bytes(pickled(marker))
    with pytest.raises(Exception):  # noqa: B017  whatever the reader says
        READERS[reader](str(path))
    assert not marker.exists()


# -- names --------------------------------------------------------------------------------------------


def configuration(**changed: Any) -> dict[str, Any]:
    """A checkpoint's state as it is loaded, by section and field."""
    cfg: dict[str, Any] = {
        "model": {"_name": "transformer_surface_fusion"},
        "task": {"_name": "translation", "dataset_impl": None, "eval_bleu": False},
        "criterion": {"_name": "label_smoothed_cross_entropy"},
        "optimizer": {"_name": "adam", "adam_betas": "(0.9, 0.98)"},
        "bpe": None,
        "tokenizer": None,
    }
    for section, value in changed.items():
        cfg[section] = {**(cfg[section] or {}), **value} if isinstance(value, dict) else value
    return {"cfg": OmegaConf.create(cfg, flags={"allow_objects": True})}


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "model": ({"model": {"_name": "fconv"}}, "names the model fconv"),
    "architecture": ({"model": {"_name": "wav2vec_seq2seq"}}, "names the model wav2vec_seq2seq"),
    "unknown model": ({"model": {"_name": "my_model"}}, "names the model my_model"),
    "no model": ({"model": {"_name": None}}, "names the model _name"),
    "model of a Namespace": ({"model": Namespace(arch="lstm")}, "names the model lstm"),
    "no section": ({"model": None}, "names the model None"),
    "two names": (
        {"model": Namespace(_name="fconv", arch="transformer_surface_fusion")},
        "names the model fconv",
    ),
    "name of a wrong type": ({"model": {"_name": ["transformer"]}}, "names the model ['transformer']"),
    "task": ({"task": {"_name": "audio_pretraining"}}, "names the task audio_pretraining"),
    "task of a Namespace": ({"task": Namespace(task="denoising")}, "names the task denoising"),
    "task hidden by a name": (
        {"task": {"_name": "translation", "task": "sentence_ranking"}},
        "names the task sentence_ranking",
    ),
    "criterion": ({"criterion": {"_name": "ctc"}}, "names the criterion ctc"),
    "criterion of a Namespace": (
        {"criterion": Namespace(_name="cross_entropy", criterion="ctc")},
        "names the criterion ctc",
    ),
    "subwords": ({"bpe": {"_name": "gpt2"}}, "names the bpe gpt2"),
    "subwords as text": ({"bpe": "bert"}, "names the bpe bert"),
    "subwords from a URL": (
        {"bpe": {"_name": "sentencepiece", "sentencepiece_model": "https://example.com/m"}},
        "names a URL for sentencepiece_model: https://example.com/m",
    ),
    "tokenizer": ({"tokenizer": {"_name": "nltk"}}, "names the tokenizer nltk"),
    "tokenizer of BLEU": (
        {"task": {"eval_bleu": True, "eval_bleu_detok": "nltk"}},
        "names the eval_bleu_detok nltk",
    ),
    "data format": ({"task": {"dataset_impl": "fasta"}}, "names the dataset_impl fasta"),
    "server": ({"task": {"use_plasma_view": True}}, "names the server of use_plasma_view"),
    **{
        f"code in {key}": ({section: {key: "f()"}}, f"holds code in {key}: 'f()' (it calls f)")
        for section, key in (
            *(("model", "encoder_xformers_att_config"), ("model", "decoder_xformers_att_config")),
            *(("model", "adaptive_softmax_cutoff"), ("model", "adaptive_input_cutoff")),
            *(("model", "character_filters"), ("optimizer", "adam_betas"), ("optimizer", "adamax_betas")),
            *(("optimizer", "lamb_betas"), ("optimizer", "adafactor_eps"), ("criterion", "wer_args")),
        )
    },
    "code in a group": (
        {"model": {"encoder": {"xformers_att_config": "f()"}}},
        "holds code in xformers_att_config: 'f()' (it calls f)",
    ),
    "code in a list": (
        {"model": Namespace(arch="transformer", groups=[{"character_filters": "f()"}])},
        "holds code in character_filters: 'f()' (it calls f)",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_a_configuration_outside_the_allowlist_is_refused(case: str) -> None:
    changed, words = REFUSED[case]
    state = configuration(**changed)
    assert words in refusals(state)
    with pytest.raises(SurfaceFusionError) as caught:
        check_configuration(state, "some.pt")
    said = str(caught.value)
    assert said.startswith(f"checkpoint some.pt {words}")
    assert ("--trust-checkpoint" in said and TRUST_VARIABLE in said) != ("code" in words)


@pytest.mark.parametrize(
    "changed",
    [
        {},
        *({"model": {"_name": name}} for name in MODELS),
        {"model": {"_name": "transformer_wmt_en_de_big"}},
        {"model": {"_name": "transformer_surface_fusion_iwslt_de_en"}},
        {"model": Namespace(arch="transformer_align")},
        {"model": OmegaConf.create({"transformer": {"dropout": 0.1}})},
        *({"task": {"_name": name, "dataset_impl": "mmap"}} for name in TASKS),
        {"criterion": {"_name": "fused_label_smoothed_cross_entropy"}},
        {"bpe": {"_name": "sentencepiece", "sentencepiece_model": "spm.model"}},
        {"bpe": "characters", "tokenizer": "moses"},
        {"model": {"encoder_xformers_att_config": "{'name': 'scaled_dot_product'}"}},
        {"model": {"adaptive_softmax_cutoff": [10, 20]}},
    ],
    ids=str,
)
def test_configurations_of_our_trainings_and_of_plain_transformers_are_allowed(
    changed: dict[str, Any],
) -> None:
    state = configuration(**changed)
    if "transformer" in state["cfg"].model:
        state["cfg"].model = changed["model"]
    assert refusals(state) == []
    check_configuration(state, "some.pt")


def test_values_given_by_the_user_are_allowed() -> None:
    state = configuration(bpe={"_name": "gpt2", "gpt2_vocab_bpe": "http://a/b"}, model={"_name": "fconv"})
    overrides = {"arch": "fconv", "bpe": "gpt2", "gpt2_vocab_bpe": "http://a/b", "beam": 4}
    check_configuration(state, "some.pt", overrides)
    with pytest.raises(SurfaceFusionError, match="names a URL for gpt2_vocab_bpe"):
        check_configuration(state, "some.pt", {"arch": "fconv", "bpe": "gpt2"})


@pytest.mark.parametrize(
    ("changed", "overrides", "words"),
    [
        ({"bpe": {"_name": "gpt2"}}, {"data": "gpt2"}, "names the bpe gpt2"),
        ({"bpe": {"_name": "gpt2"}}, {"bpe": "bert"}, "names the bpe gpt2"),
        ({"model": {"_name": "fconv"}}, {"task": "fconv"}, "names the model fconv"),
        ({"task": {"_name": "denoising"}}, {"arch": "denoising"}, "names the task denoising"),
        ({"task": {"dataset_impl": "fasta"}}, {"data": "fasta"}, "names the dataset_impl fasta"),
        ({"task": {"use_plasma_view": True}}, {"cpu": True}, "names the server of use_plasma_view"),
        ({"task": {"use_plasma_view": True}}, {"use_plasma_view": False}, "names the server"),
        ({"optimizer": {"adam_betas": "f()"}}, {"data": "f()"}, "holds code in adam_betas"),
        (
            {"bpe": {"_name": "sentencepiece", "sentencepiece_model": "https://a.b/m"}},
            {"data": "https://a.b/m"},
            "names a URL for sentencepiece_model: https://a.b/m",
        ),
    ],
)
def test_an_override_of_another_field_allows_nothing(
    changed: dict[str, Any], overrides: dict[str, Any], words: str
) -> None:
    with pytest.raises(SurfaceFusionError, match=words):
        check_configuration(configuration(**changed), "some.pt", overrides)


@pytest.mark.parametrize(
    ("changed", "overrides"),
    [
        ({"task": {"use_plasma_view": True}}, {"use_plasma_view": True}),
        ({"task": {"dataset_impl": "fasta"}}, {"dataset_impl": "fasta"}),
        ({"model": {"_name": "fconv"}}, {"arch": "fconv"}),
        ({"bpe": {"_name": "gpt2"}}, {"bpe": "gpt2"}),
    ],
)
def test_an_override_of_this_field_is_allowed(changed: dict[str, Any], overrides: dict[str, Any]) -> None:
    state = configuration(**changed)
    assert len(refusals(state)) == 1
    check_configuration(state, "some.pt", overrides)


def test_the_stored_task_is_not_checked_if_the_command_line_names_one() -> None:
    state = configuration(**REFUSED["task"][0])
    assert len(refusals(state)) == 1
    check_configuration(state, "some.pt", with_task=False)


def test_models_of_the_users_own_code_are_allowed() -> None:
    @register_model("a_model_of_the_users")
    class Model(FairseqEncoderDecoderModel):
        pass

    register_model_architecture("a_model_of_the_users", "an_architecture_of_the_users")(lambda args: None)
    state = configuration(model={"_name": "an_architecture_of_the_users"})
    assert refusals(state) == []
    check_configuration(state, "some.pt")


@pytest.mark.parametrize(
    ("value", "trust"), [("1", True), ("True", True), ("yes", True), ("0", False), ("", False)]
)
def test_the_trust_variable_is_read_as_torch_reads_it(
    monkeypatch: pytest.MonkeyPatch, value: str, trust: bool
) -> None:
    monkeypatch.setenv(TRUST_VARIABLE, value)
    assert trusted() is trust
    if trust:
        check_configuration(configuration(**REFUSED["model"][0]), "some.pt")


# -- loading ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("trust", [False, True])
def test_no_architecture_of_a_published_file_evaluates_its_layers(
    checkpoint: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trust: bool
) -> None:
    """S2; with trust, the layers are still parsed as literals."""
    marker = tmp_path / "marker"
    layers = {"encoder_layers": expression(marker), "decoder_layers": expression(marker)}
    rewrite(
        checkpoint,
        lambda state: (
            vars(state["args"]).update(
                arch="fconv", decoder_attention=expression(marker), dropout=0.1, **layers
            )
            or vars(state["args"]).pop("sf_fuision_mode", None)
        ),
    )
    words = r"checkpoint .* names the model fconv, which is not on the list"
    if trust:
        monkeypatch.setenv(TRUST_VARIABLE, "1")
        words = r"is not a literal \(it calls __import__"
    with pytest.raises(SurfaceFusionError, match=words):
        checkpoint_utils.load_model_ensemble_and_task(
            [str(checkpoint)], {"data": str(checkpoint.parent / "data-bin")}
        )
    assert not marker.exists()


@pytest.mark.parametrize("side", ["encoder", "decoder"])
def test_no_attention_configuration_is_evaluated(checkpoint: Path, tmp_path: Path, side: str) -> None:
    """S1."""
    marker, key = tmp_path / "marker", f"{side}_xformers_att_config"
    rewrite(checkpoint, lambda state: setattr(state["args"], key, expression(marker)))
    with pytest.raises(SurfaceFusionError, match=rf"holds code in {key}: .*it calls __import__"):
        SurfaceFusionModel.from_pretrained(str(tmp_path), checkpoint.name, str(tmp_path / "data-bin"))
    assert not marker.exists()


def test_a_state_that_the_caller_loaded_is_checked_too(checkpoint: Path) -> None:
    rewrite(checkpoint, lambda state: setattr(state["args"], "adam_betas", "f()"))
    state = checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint))
    with pytest.raises(SurfaceFusionError, match="holds code in adam_betas"):
        checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], state=state)


@pytest.mark.parametrize(
    "change",
    [
        lambda state: setattr(state["args"], "bpe_codes", "${oc.env:SECRET}"),
        lambda state: setattr(state["args"], "langs", ["en", {"a": "x${oc.env:SECRET}"}]),
        lambda state: state.update(args=None, cfg={"model": {"note": "${oc.env:SECRET}"}}),
        lambda state: state.update(args=None, cfg={"model": Namespace(note="${oc.env:SECRET}")}),
        lambda state: state.update(args=None, cfg=OmegaConf.create({"task": {"note": "${oc.env:SECRET}"}})),
        lambda state: state.update(args=None, cfg=[{"note": "${oc.env:SECRET}"}]),
        lambda state: setattr(state["args"], "bpe_codes", AnyNode("${oc.env:SECRET}")),
        lambda state: vars(state["args"]).update({"${oc.env:SECRET}": 1}),
        lambda state: state.update(args=TransformerConfig(activation_fn="${oc.env:SECRET}")),
    ],
)
def test_no_configuration_reads_the_environment(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, change: Callable[[dict[str, Any]], object]
) -> None:
    """``average`` would write what it reads into the file that it makes."""
    monkeypatch.setenv("SECRET", "password")
    rewrite(checkpoint, change)
    for load in (checkpoint_utils.load_checkpoint_to_cpu, lambda path: average_checkpoints([path])):
        with pytest.raises(SurfaceFusionError) as caught:
            load(str(checkpoint))
        said = str(caught.value)
        assert "holds the interpolation" in said and "${oc.env:SECRET}" in said and "password" not in said


@pytest.mark.parametrize("part", ["cfg", "extra_state", "the file", "node"])
def test_no_resolver_registered_by_the_user_runs_for_a_checkpoint(
    checkpoint: Path, tmp_path: Path, part: str
) -> None:
    """Programs register one that evaluates; overrides read each field before the checkpoint is upgraded."""
    marker = tmp_path / "marker"
    OmegaConf.register_new_resolver("touch", lambda: marker.touch())
    config = OmegaConf.create({"model": {"note": "${touch:}"}, "cfg": "${touch:}", "args": "${touch:}"})
    try:
        if part == "the file":
            torch.save(config, checkpoint)
        elif part == "node":
            rewrite(checkpoint, lambda state: state.update(args=None, cfg=DictConfig("${touch:}")))
        else:
            rewrite(checkpoint, lambda state: state.update({"args": None, part: config}))
        with pytest.raises(SurfaceFusionError, match=r"holds the interpolation (note|cfg)="):
            checkpoint_utils.load_checkpoint_to_cpu(str(checkpoint), {"data": "elsewhere"})
    finally:
        OmegaConf.clear_resolver("touch")
    assert not marker.exists()


def test_our_checkpoints_and_published_checkpoints_load(checkpoint: Path) -> None:
    data = str(checkpoint.parent / "data-bin")
    loaded, cfg, task = checkpoint_utils.load_model_ensemble_and_task([str(checkpoint)], {"data": data})
    assert isinstance(loaded[0], SurfaceFusionModel) and len(task.target_dictionary) > 4
    assert cfg.model.arch == "transformer_surface_fusion"


def test_building_from_the_command_line_is_not_restricted() -> None:
    """Neither a task nor a model that no file named."""
    args = Namespace(
        task="translation_lev", data=data_folder(), source_lang="en", target_lang="ro", dataset_impl=None
    )
    task = tasks.setup_task(copy.copy(args))
    model_args = Namespace(
        arch="fconv_iwslt_de_en", share_input_output_embed=False, dropout=0.1, data=args.data
    )
    vars(model_args).update(encoder_layers="[(16, 3)] * 2", decoder_layers="[(16, 3)]")
    vars(model_args).update(encoder_embed_dim=16, decoder_embed_dim=16, decoder_out_embed_dim=16)
    vars(model_args).update(max_source_positions=20, max_target_positions=20)
    model = models.build_model(model_args, task)
    assert len(model.encoder.convolutions) == 2
