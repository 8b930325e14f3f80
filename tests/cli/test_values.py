"""The verbs refuse invalid numbers and names in one line, before any work is done.

Tests ``cli/fairseq_verbs.py``, ``compat/model_overrides.py`` and ``config/validation.py``.
"""

import io
import sys

import pytest
from fairseq import options, tasks
from fairseq.dataclass.utils import convert_namespace_to_omegaconf
from fairseq.trainer import Trainer

from surface_fusion.cli.main import main
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel
from tests.helpers.small_training import OPTIMISER, PLAIN, TRAIN


@pytest.mark.parametrize(
    "flags, line",
    [
        (("--label-smoothing", 1.5), "--label-smoothing 1.5 is not a probability below 1"),
        (("--clip-norm", "nan"), "--clip-norm nan: give a number of at least 0"),
        (("--encoder-layers", -1), "--encoder-layers -1: give a number of at least 0"),
        (("--encoder-layerdrop", 2), "--encoder-layerdrop 2.0: give a number in [0, 1]"),
        (("--batch-size", 0), "--batch-size 0: give a number of at least 1"),
        (("--update-freq", 0), "--update-freq 0: give a number of at least 1"),
        (("--seed", -1), "--seed -1 is not a seed: give an integer from 0 to 4000000000"),
        (("--encoder-embed-dim", 3, "--encoder-attention-heads", 1), "--encoder-embed-dim 3 is too small"),
        (
            ("--lr-scheduler", "inverse_sqrt", "--warmup-updates", 0),
            "--warmup-updates 0 cannot be used with --lr-scheduler inverse_sqrt",
        ),
        (("--lr=",), "--lr has no value; give at least one number"),
        (("--decoder-output-dim", "{"), "--decoder-output-dim {: give an integer"),
        (("--tpu",), "--tpu, which fairseq sets with --bf16 too, needs torch_xla; leave it out"),
        (("--use-plasma-view",), "--use-plasma-view needs pyarrow; pip install pyarrow or leave it out"),
    ],
)
def test_invalid_numbers_of_a_training_are_refused(refused, data, tmp_path, flags, line):
    said = refused("train", data, *TRAIN, "--save-dir", tmp_path / "s", "--max-update", 1, *flags)
    assert said.startswith(line)
    assert not (tmp_path / "s").exists() or not [*(tmp_path / "s").iterdir()]


@pytest.mark.parametrize(
    "flags, line",
    [
        (("--eval-bleu-args", "{'beam':3}"), "--eval-bleu-args {'beam':3} is not JSON: "),
        (("--eval-bleu-args", "[3]"), "--eval-bleu-args [3] is not a JSON object; "),
        (
            ("--eval-bleu-args", '{"beem": 3}'),
            "beem in --eval-bleu-args is not a generation setting; did you",
        ),
        (("--eval-bleu-args", '{"beam": 0}'), "--beam 0: give a number of at least 1"),
        (("--eval-bleu-detok-args", "{"), "--eval-bleu-detok-args { is not JSON: "),
        (("--eval-bleu-detok", "nosuch"), "--eval-bleu-detok nosuch: choose one of moses, nltk, space"),
    ],
)
def test_invalid_arguments_of_eval_bleu_are_refused(refused, data, tmp_path, flags, line):
    assert refused("train", data, *TRAIN, "--save-dir", tmp_path, "--eval-bleu", *flags).startswith(line)


@pytest.mark.parametrize(
    "metric, advice",
    [("bleu", "add --eval-bleu"), ("accuracy", "choose one of loss, nll_loss, ppl")],
)
def test_a_metric_that_is_not_logged_is_refused(refused, data, tmp_path, metric, advice):
    said = refused("train", data, *TRAIN, "--save-dir", tmp_path, "--best-checkpoint-metric", metric)
    assert said == f"--best-checkpoint-metric {metric} is not logged by validation; {advice}"


def test_a_metric_of_which_more_is_better_must_be_maximised(refused, data, tmp_path):
    flags = ("--eval-bleu", "--best-checkpoint-metric", "bleu")
    said = refused("train", data, *TRAIN, "--save-dir", tmp_path, *flags)
    assert said.startswith(
        "--best-checkpoint-metric bleu would keep the checkpoint with the lowest bleu; add "
    )


def test_a_metric_that_another_criterion_does_not_log_is_refused(refused, data, tmp_path):
    criterion = ("--criterion", "label_smoothed_cross_entropy_with_alignment", "--max-update", 1)
    said = refused(
        "train", data, *TRAIN, *criterion, "--save-dir", tmp_path, "--best-checkpoint-metric", "wer"
    )
    assert said == "validation does not log 'wer', which --best-checkpoint-metric names; give another metric"


@pytest.mark.parametrize(
    "package, verb, flags",
    [
        ("sacremoses", "train", ("--eval-bleu", "--eval-bleu-detok", "moses")),
        ("editdistance", "generate", ("--scoring", "wer")),
        ("subword-nmt", "interactive", ("--bpe", "subword_nmt", "--bpe-codes", "dict.en.txt")),
    ],
)
@pytest.mark.slow
def test_a_missing_package_is_named(refused, data, checkpoint, tmp_path, monkeypatch, package, verb, flags):
    monkeypatch.setitem(sys.modules, package.replace("-", "_"), None)
    monkeypatch.chdir(data)
    others = (*TRAIN, "--save-dir", tmp_path) if verb == "train" else ("--path", checkpoint, "--cpu")
    said = refused(verb, data, *others, *flags)
    assert said.startswith("Please install ") and (package in said)


@pytest.mark.parametrize(
    "flags, missing",
    [
        (("--bpe", "sentencepiece"), "--sentencepiece-model"),
        (("--bpe", "subword_nmt"), "--bpe-codes"),
        (("--tokenizer", "moses"), "--source-lang"),
    ],
)
def test_a_missing_setting_is_named(refused, data, checkpoint, flags, missing):
    assert (
        refused("interactive", data, "--path", checkpoint, "--cpu", *flags) == f"{missing} is missing; add it"
    )


@pytest.mark.parametrize(
    "verb, flags, line",
    [
        ("generate", ("--constraints",), "--constraints works in interactive only"),
        ("generate", ("--replace-unk",), "--replace-unk copies words of the source text, which binarised"),
        ("generate", ("--print-step",), "--print-step needs an iterative model; leave it out"),
        ("interactive", ("--retain-iter-history",), "--retain-iter-history needs an iterative model; leave"),
        ("interactive", ("--print-alignment", "soft"), "--print-alignment soft works in generate only"),
    ],
)
def test_a_flag_of_another_command_is_refused(refused, data, checkpoint, monkeypatch, verb, flags, line):
    monkeypatch.setattr(sys, "stdin", io.StringIO("Hi\n"))
    assert refused(verb, data, "--path", checkpoint, "--cpu", *flags).startswith(line)


def test_numbers_are_checked_for_a_plain_transformer(refused, data, tmp_path):
    flags = ("--label-smoothing", 1.5, "--max-update", 1, "--save-dir", tmp_path / "s")
    said = refused("train", data, *PLAIN, *OPTIMISER, *flags)
    assert said.startswith("--label-smoothing 1.5 is not a probability below 1")


def test_an_assertion_of_fairseq(refused, data, tmp_path):
    flags = ("--adaptive-softmax-cutoff", 9999, "--max-update", 1, "--save-dir", tmp_path / "s")
    said = refused("train", data, *PLAIN, *OPTIMISER, *flags)
    assert said == "cannot specify cutoff larger than vocab size"


@pytest.mark.parametrize(
    "value, line",
    [
        ("[1", "the value '[1' of a flag is not a number or list: '[' was never closed"),
        ("word", "the value of a flag is not a number or list: malformed node or string"),
        ("", "the value of a flag is not a number or list: invalid syntax"),
    ],
)
def test_a_value_that_fairseq_reads_as_a_literal(refused, data, checkpoint, value, line):
    said = refused("validate", data, "--path", checkpoint, "--cpu", f"--max-sentences-valid={value}")
    assert said == line


@pytest.mark.parametrize("verb", ["generate", "interactive"])
@pytest.mark.parametrize(
    "flags, line",
    [
        (("--nbest", 5, "--beam", 2), "--nbest 5 is more than --beam 2; raise --beam"),
        (("--beam", 0), "--beam 0: give a number of at least 1"),
        (("--beam", -1), "--beam -1: give a number of at least 1"),
        (("--batch-size", 0), "--batch-size 0: give a number of at least 1"),
        (("--min-len", 30, "--max-len-b", 20), "--min-len 30 is more than --max-len-b 20"),
        (("--temperature", 0), "--temperature 0.0: give a number above 0"),
        (("--lenpen", "nan"), "--lenpen nan: give a number in [-100, 100]"),
    ],
)
def test_invalid_numbers_of_a_generation_are_refused(refused, data, checkpoint, verb, flags, line):
    said = refused(verb, data, "--path", checkpoint, "--cpu", *flags)
    assert said.startswith(line)


@pytest.mark.parametrize("verb", ["generate", "interactive", "validate"])
@pytest.mark.parametrize(
    "key, advice",
    [
        ("sf_gat", "did you mean sf_gate?"),
        ("encoder_layer", "did you mean encoder_layers?"),
        ("qq", "remove it"),
    ],
)
@pytest.mark.slow
def test_a_misspelt_override_is_refused(refused, data, checkpoint, verb, key, advice):
    flags = ("--batch-size", 1, "--path", checkpoint, "--cpu", "--model-overrides", f"{{'{key}': 1}}")
    said = refused(verb, data, *flags)
    assert said == f"override '{key}' of {checkpoint} is not a setting of its model; {advice}"


def test_an_override_of_another_type_is_refused(refused, data, checkpoint):
    flags = ("--path", checkpoint, "--cpu", "--model-overrides", "{'dropout': 'much'}")
    assert refused("generate", data, *flags) == "--dropout 'much': give a number"


@pytest.mark.parametrize("overrides", ["{'sf_gate': 0.9, 'sf_plain': True}", "{'beam': 2}", "{'data': 'x'}"])
@pytest.mark.slow
def test_overrides_of_any_setting_are_accepted(command, data, checkpoint, overrides):
    flags = ("--path", checkpoint, "--cpu", "--max-len-b", 5, "--beam", 1, "--model-overrides", overrides)
    assert command("generate", data, "--gen-subset", "valid", "--num-workers", 0, *flags).status == 0


def test_keywords_of_from_pretrained_are_checked(checkpoint, data):
    place = (str(checkpoint.parent), checkpoint.name, str(data))
    with pytest.raises(SurfaceFusionError, match="did you mean sf_gate"):
        SurfaceFusionModel.from_pretrained(*place, sf_gat=0.9)
    with pytest.raises(SurfaceFusionError, match=r"--dropout 1\.5: give a number in \[0, 1\]"):
        SurfaceFusionModel.from_pretrained(*place, dropout=1.5)
    hub = SurfaceFusionModel.from_pretrained(*place, sf_gate=0.9, tokenizer="space")
    assert hub.models[0].decoder.cfg.sf_gate == 0.9


@pytest.mark.parametrize(
    "flags, line", [(("--workers", 0), "--workers 0: give"), (("--nwordssrc", -5), "--nwordssrc -5: give")]
)
def test_invalid_numbers_of_preprocess_are_refused(refused, tmp_path, flags, line):
    argv = ("-s", "en", "-t", "ro", "--trainpref", tmp_path / "no", "--destdir", tmp_path / "out", *flags)
    assert refused("preprocess", *argv).startswith(line)
    assert not (tmp_path / "out").exists()


def test_the_trainer_checks_a_changed_configuration(data):
    """fairseq's own command knows them when the trainer is made."""
    argv = [str(data), *map(str, TRAIN)]
    cfg = convert_namespace_to_omegaconf(options.parse_args_and_arch(options.get_training_parser(), argv))
    task = tasks.setup_task(cfg.task)
    model, criterion = task.build_model(cfg.model), task.build_criterion(cfg.criterion)
    cfg.criterion.label_smoothing = 1.5
    with pytest.raises(SurfaceFusionError, match=r"--label-smoothing 1\.5 is not a probability below 1"):
        Trainer(cfg, task, model, criterion)


@pytest.mark.slow
def test_unusual_but_valid_numbers_are_accepted(data, tmp_path):
    flags = ("--label-smoothing", 0, "--clip-norm", 0, "--lr", 0, "--dropout", 0, "--update-freq", 2)
    assert (
        main(["train", str(data), *map(str, TRAIN), *map(str, flags), "--max-update", "1", "--no-save"]) == 0
    )
