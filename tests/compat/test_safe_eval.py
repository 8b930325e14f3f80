"""No text of a configuration or data file is evaluated."""

import importlib
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import MagicMock

import fairseq
import pytest
from fairseq import utils

from surface_fusion import SurfaceFusionError
from surface_fusion.compat.safe_eval import MODULES, _exists, literal
from tests.helpers.code_calls import calls


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("[(512, 3)] * 2 + [(1024, 3)]", [(512, 3), (512, 3), (1024, 3)]),
        ("2 * [1]", [1, 1]),
        ("(1,) + (2,)", (1, 2)),
        ("(0.9, 0.98)", (0.9, 0.98)),
        ("1e-4", 1e-4),
        ("-1", -1),
        ("+1.5", 1.5),
        ("512 * 4 + 1 - 2", 2047),
        ("1 / 4", 0.25),
        ("True", True),
        ("None", None),
        (" {'name': 'scaled_dot_product', 'dropout': 0.1}\n", {"name": "scaled_dot_product", "dropout": 0.1}),
        ("{1, 2}", {1, 2}),
        ("[]", []),
        ("'ab' 'c'", "abc"),
    ],
)
def test_literals_have_their_value(text: str, value: object) -> None:
    found = literal(text)
    assert found == value and type(found) is type(value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("__import__('os').system('true')", "it calls __import__('os').system"),
        ("[open('x')]", "it calls open"),
        ("{'a': print()}", "it calls print"),
        ("lambda: 1", "it holds Lambda"),
        ("os", "it names os"),
        ("(1).real", "it holds Attribute"),
        ("[1][0]", "it holds Subscript"),
        ("[x for x in [1]]", "it holds ListComp"),
        ("f'{1}'", "it holds JoinedStr"),
        ("(x := 1)", "it holds NamedExpr"),
        ("{**{}}", "it unpacks a dictionary"),
        ("[*[1]]", "it holds Starred"),
        ("1 if 1 else 2", "it holds IfExp"),
        ("9 ** 9", "Pow of numbers"),
        ("1 // 2", "FloorDiv of numbers"),
        ("-'a'", "it negates what is not a number"),
        ("not 1", "it holds UnaryOp"),
        ("'a' * 3", "Mult of str and int"),
        ("[1] + (2,)", "Add of list and tuple"),
        ("[1] * True", "Mult of list and bool"),
        ("[0] * 10 ** 9", "Pow of numbers"),
        ("[0] * 1000000000", "more than 10000 items"),
        ("[[[0] * 100] * 100] * 100", "more than 10000 items"),
        ("[[]] * 10000000", "more than 10000 items"),
        ("+".join(["[1]"] * 200), "more than 100 operations"),
        ("[" + ",".join(["+".join(["[1]"] * 900)] * 270) + "]", "more than 100 operations"),
        ("9223372036854775807 * 9", "a number of more than 63 bits"),
        ("1 / 0", "ZeroDivisionError"),
        ("{[]: 1}", "TypeError"),
        ("import os", "SyntaxError"),
        ("1; 2", "SyntaxError"),
        ("", "SyntaxError"),
        ("\0", "Error"),
        ("(" * 5000, "Error"),
        ("-" * 50000 + "1", "Error"),
        ("[0," * 90000, "Error"),
        ("0" * 1000001, "longer than 1000000 characters"),
    ],
)
def test_expressions_other_than_literals_are_refused_by_name(text: str, reason: str) -> None:
    with pytest.raises(SurfaceFusionError) as caught:
        literal(text)
    said = str(caught.value)
    assert " is not a literal (" in said and reason in said and len(said) < 400 and "\n" not in said


def test_other_types_raise_a_type_error_as_in_eval() -> None:
    """``fairseq.utils.eval_bool`` answers it with its default."""
    with pytest.raises(TypeError, match="not bool"):
        literal(True)  # type: ignore[arg-type]
    assert utils.eval_bool(False, default=True) is True


def test_fairseqs_helpers_return_the_same_values() -> None:
    assert utils.eval_str_list("[1, 2]", type=int) == [1, 2]
    assert utils.eval_str_list("3", type=int) == [3]
    assert utils.eval_str_list(None) is None
    assert utils.eval_str_list([1, 2]) == [1.0, 2.0]
    assert utils.eval_str_dict("{'a': 1}") == {"a": 1}
    assert utils.eval_bool("True") is True and utils.eval_bool("0") is False
    assert utils.eval_bool(None, default=True) is True


# -- every call of eval in fairseq ----------------------------------------------------------------

Evaluate = Callable[[str, Path], object]


def build(model: str, field: str, *parts: str, **other: Any) -> Evaluate:
    """``build_model`` of the class *model*, of whose parts nothing is built."""
    module_name, _, class_name = model.rpartition(".")

    def evaluate(text: str, _: Path) -> None:
        module = importlib.import_module(module_name)
        with pytest.MonkeyPatch.context() as patch:
            for part in parts:
                patch.setattr(module, part, MagicMock())
            getattr(module, class_name).build_model(MagicMock(**{**other, field: text}), MagicMock())

    return evaluate


def construct(name: str, field: str, *more: Any, **other: Any) -> Evaluate:
    """The class *name* with a configuration; what follows the evaluation may fail."""
    module_name, _, class_name = name.rpartition(".")

    def evaluate(text: str, _: Path) -> None:
        cfg = MagicMock(**{**other, field: text})
        module = importlib.import_module(module_name)
        with pytest.MonkeyPatch.context() as patch:
            for part in ("ConvFeatureExtractionModel", "TransposeLast"):
                if hasattr(module, part):
                    patch.setattr(module, part, MagicMock())
            getattr(module, class_name)(cfg, *more)

    return evaluate


def optimizer(name: str, attribute: str, field: str) -> Evaluate:
    """``optimizer_config`` of the class *name*."""
    module_name, _, class_name = name.rpartition(".")

    def evaluate(text: str, _: Path) -> None:
        cls = getattr(importlib.import_module(module_name), class_name)
        cls.optimizer_config.fget(SimpleNamespace(**{attribute: MagicMock(**{field: text})}))

    return evaluate


def manifest(text: str, folder: Path) -> None:
    (folder / "manifest").write_text(f"{text}\n")
    importlib.import_module("fairseq.data.codedataset").parse_manifest(folder / "manifest", MagicMock())


def mask_specification(text: str, _: Path) -> None:
    module = importlib.import_module("fairseq.data.audio.raw_audio_dataset")
    module.RawAudioDataset(16000, feature_encoder_spec=text)


def output_lengths(text: str, _: Path) -> None:
    model = importlib.import_module("fairseq.models.wav2vec.wav2vec2").Wav2Vec2Model
    model._get_feat_extract_output_lengths(MagicMock(cfg=MagicMock(conv_feature_layers=text)), MagicMock())


MODEL = "fairseq.models"
FCONV_VALUES = {
    "encoder_embed_path": "",
    "decoder_embed_path": "",
    **dict.fromkeys(("encoder_layers", "decoder_layers"), "[(8, 3)]"),
    **dict.fromkeys(("pretrained", "encoder_attention", "decoder_attention", "self_attention"), "False"),
    **dict.fromkeys(("project_input", "gated_attention", "downsample"), "False"),
}
FCONV_PARTS = ("FConvEncoder", "FConvDecoder")

SITES: dict[tuple[str, str], Evaluate] = {
    ("utils.py", "list"): lambda text, _: utils.eval_str_list(text),
    ("utils.py", "dict"): lambda text, _: utils.eval_str_dict(text),
    ("utils.py", "bool"): lambda text, _: utils.eval_bool(text),
    ("criterions/ctc.py", "eval(cfg.wer_args)"): construct(
        "fairseq.criterions.ctc.CtcCriterion", "wer_args", MagicMock()
    ),
    ("data/audio/raw_audio_dataset.py", "eval(feature_encoder_spec)"): mask_specification,
    ("data/codedataset.py", "eval(line.strip())"): manifest,
    **{
        ("models/fconv.py", f"eval(args.{field})"): build(
            f"{MODEL}.fconv.FConvModel", field, *FCONV_PARTS, **FCONV_VALUES
        )
        for field in ("encoder_layers", "decoder_layers", "decoder_attention")
    },
    **{
        ("models/fconv_lm.py", f"eval(args.{field})"): build(
            f"{MODEL}.fconv_lm.FConvLanguageModel", field, "FConvDecoder", **FCONV_VALUES
        )
        for field in ("decoder_layers", "decoder_attention")
    },
    **{
        ("models/fconv_self_att.py", f"eval(args.{field})"): build(
            f"{MODEL}.fconv_self_att.FConvModelSelfAtt", field, *FCONV_PARTS, **FCONV_VALUES
        )
        for field in (
            *("pretrained", "encoder_layers", "encoder_attention", "decoder_layers", "decoder_attention"),
            *("self_attention", "project_input", "gated_attention", "downsample"),
        )
    },
    ("models/hubert/hubert.py", "eval(cfg.conv_feature_layers)"): construct(
        f"{MODEL}.hubert.hubert.HubertModel", "conv_feature_layers", MagicMock(), []
    ),
    ("models/lightconv_lm.py", "eval(args.character_filters)"): build(
        f"{MODEL}.lightconv_lm.LightConvLanguageModel",
        "character_filters",
        "CharacterTokenEmbedder",
        decoder_kernel_size_list=[3],
        decoder_layers=1,
    ),
    **{
        ("models/multires_hubert/multires_hubert.py", f"eval(cfg.{field})"): construct(
            f"{MODEL}.multires_hubert.multires_hubert.MultiresHubertModel",
            field,
            MagicMock(),
            [],
            conv_feature_layers="[(8, 3, 2)]",
            encoder_embed_dim=8,
        )
        for field in ("conv_feature_layers", "override_encoder_layers")
    },
    ("models/speech_to_text/s2t_wav_transformer.py", "eval(args.conv_feature_layers)"): construct(
        f"{MODEL}.speech_to_text.s2t_wav_transformer.SpeechWavTransformerEncoder",
        "conv_feature_layers",
        encoder_embed_dim=4,
    ),
    ("models/transformer_lm.py", "eval(args.character_filters)"): build(
        f"{MODEL}.transformer_lm.TransformerLanguageModel",
        "character_filters",
        "CharacterTokenEmbedder",
        decoder_layers_to_keep=None,
    ),
    ("models/wav2vec/wav2vec.py", "eval(cfg.conv_feature_layers)"): construct(
        f"{MODEL}.wav2vec.wav2vec.Wav2VecModel", "conv_feature_layers", activation="relu"
    ),
    ("models/wav2vec/wav2vec.py", "eval(cfg.conv_aggregator_layers)"): construct(
        f"{MODEL}.wav2vec.wav2vec.Wav2VecModel",
        "conv_aggregator_layers",
        activation="relu",
        conv_feature_layers="[(8, 3, 2)]",
        vq_type="none",
        offset="auto",
        aggregator="cnn",
    ),
    ("models/wav2vec/wav2vec2.py", "eval(cfg.conv_feature_layers)"): construct(
        f"{MODEL}.wav2vec.wav2vec2.Wav2Vec2Model", "conv_feature_layers"
    ),
    ("models/wav2vec/wav2vec2.py", "eval(self.cfg.conv_feature_layers)"): output_lengths,
    ("optim/adafactor.py", "eval(self.args.adafactor_eps)"): optimizer(
        "fairseq.optim.adafactor.FairseqAdafactor", "args", "adafactor_eps"
    ),
    ("optim/adam.py", "eval(self.cfg.adam_betas)"): optimizer(
        "fairseq.optim.adam.FairseqAdam", "cfg", "adam_betas"
    ),
    ("optim/adamax.py", "eval(self.args.adamax_betas)"): optimizer(
        "fairseq.optim.adamax.FairseqAdamax", "args", "adamax_betas"
    ),
    ("optim/cpu_adam.py", "eval(self.cfg.adam_betas)"): optimizer(
        "fairseq.optim.cpu_adam.FairseqCPUAdam", "cfg", "adam_betas"
    ),
    ("optim/fused_lamb.py", "eval(self.args.lamb_betas)"): optimizer(
        "fairseq.optim.fused_lamb.FairseqLAMB", "args", "lamb_betas"
    ),
}


@pytest.mark.parametrize("site", SITES, ids="-".join)
def test_no_call_of_eval_runs_code(site: tuple[str, str], tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    with pytest.raises(SurfaceFusionError, match=r"is not a literal \(it calls __import__"):
        SITES[site](f"__import__('pathlib').Path({str(marker)!r}).touch()", tmp_path)
    assert not marker.exists()


def test_every_call_of_eval_has_a_test() -> None:
    found = {
        (file.removeprefix("fairseq/"), call)
        for file, call in calls(Path(fairseq.__file__).parent)
        if call.startswith(("eval(", "exec(")) and file != "fairseq/utils.py"
    }
    assert found == {site for site in SITES if site[0] != "utils.py"}


@pytest.mark.slow
def test_every_module_that_evaluates_is_patched() -> None:
    folder = Path(fairseq.__file__).parent
    evaluating = {file for file, call in calls(folder) if call.startswith("eval(")}
    assert {f"{name.replace('.', '/')}.py" for name in MODULES} == evaluating
    assert all(vars(importlib.import_module(name))["eval"].__wrapped__ is eval for name in MODULES)


def test_modules_that_a_build_of_fairseq_lacks_are_left_out() -> None:
    """fairseq-fixed, for Python 3.10 and 3.13, has no ``fairseq.models.multires_hubert``."""
    assert not _exists("fairseq.models.nowhere.nowhere")
    assert not _exists("fairseq.nowhere")
    assert _exists("fairseq.optim.adam") and "fairseq.optim.adam" in MODULES
