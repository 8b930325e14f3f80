"""A user's mistake ends in one line on stderr and status 2, wherever it is noticed."""

import shutil
from functools import partial

import pytest
import torch
import torch.multiprocessing

from surface_fusion import SurfaceFusionError
from surface_fusion.cli import fairseq_verbs
from surface_fusion.cli.user_errors import user_line
from tests.helpers import warm_processes
from tests.helpers.small_training import PREPROCESS, TEXT, TRAIN


@pytest.fixture
def train(data, tmp_path, refused):
    return partial(refused, "train", data, *TRAIN, "--save-dir", tmp_path / "checkpoints", "--max-update", 1)


@pytest.fixture(scope="session")
def other_data(tmp_path_factory):
    """Data with another dictionary."""
    folder = tmp_path_factory.mktemp("other")
    for language in ("en", "ro"):
        lines = (TEXT / f"train.{language}").read_text(encoding="utf-8").splitlines(keepends=True)
        (folder / f"some.{language}").write_text("".join(lines[:30]), encoding="utf-8")
    prefix = str(folder / "some")
    argv = ["-s", "en", "-t", "ro", "--joined-dictionary", "--destdir", str(folder / "bin")]
    assert fairseq_verbs.run("preprocess", [*argv, "--trainpref", prefix, "--validpref", prefix]) is None
    return folder / "bin"


@pytest.mark.parametrize(
    "flags, line",
    [
        (("--sf-mode", "bogus"), "argument --sf-mode: invalid choice: 'bogus' (choose from "),
        (("--surfacefusion", "sum"), "argument --surfacefusion: invalid choice: 'sum' (choose from "),
        (("--sf-gate", "1.5"), "--sf-gate 1.5 is outside [0, 1]; "),
        (("--sf-gate", "-0.1"), "--sf-gate -0.1 is outside [0, 1]; "),
        (("--sf-attention-heads", 3), "--sf-attention-heads 3 does not divide --decoder-embed-dim 16; "),
        (
            ("--encoder-attention-heads", 3),
            "--encoder-attention-heads 3 does not divide --encoder-embed-dim 16; ",
        ),
        (("--sf-idx", 1), "--sf-idx 1 is out of range for 1 decoder layers; "),
        (
            ("--adaptive-softmax-cutoff", "20"),
            "--adaptive-softmax-cutoff [20] cannot be used with --surfacefusion",
        ),
        (("--fp16",), "--fp16 needs a CUDA GPU and --cpu was given; "),
        (("--transparent-attentoin",), "unrecognized arguments: --transparent-attentoin (see "),
        (
            ("-a", "transformer_surface_fuson"),
            "argument --arch/-a: invalid choice: 'transformer_surface_fuson', did you",
        ),
        (("--lr",), "argument --lr: expected one argument (see surface-fusion train --help)"),
        (("--user-dir", "nowhere"), "--user-dir "),
        (("-s", "en", "-t", "fr"), "data folder "),
        (("--valid-subset", "dev"), "Dataset not found: dev ("),
        (("--finetune-from-model", "nowhere.pt"), "--finetune-from-model nowhere.pt does not exist"),
        (
            ("--distributed-world-size", 2, "--distributed-rank", 1),
            "--distributed-rank 1: without GPUs the command of rank 0 starts all 2 processes",
        ),
    ],
    ids=lambda value: " ".join(map(str, value)) if isinstance(value, tuple) else "",
)
def test_an_invalid_flag_of_train_is_named(train, flags, line, monkeypatch):
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 0)
    said = train(*flags)
    assert said.startswith(line)
    assert len(said) < 400


@pytest.mark.parametrize("optimizer", ["adam", "flat_adam"])
def test_a_training_that_diverges_says_so(data, tmp_path, refused, optimizer):
    flags = (*TRAIN, "--optimizer", optimizer, "--lr", 1e4, "--max-update", 50, "--warmup-updates", 1)
    said = refused("train", data, *flags, "--save-dir", tmp_path)
    assert said == "the training diverged, gradients are Nan/Inf; lower --lr or warm up longer"


def test_batch_size_must_be_given(refused, data):
    said = refused("train", data, "--cpu", "--task", "language_modeling", "-a", "transformer_lm")
    assert said == "Must specify batch size either with --max-tokens or --batch-size"


def test_data_must_be_given(refused):
    assert refused("train").startswith("the following arguments are required: data (see ")


@pytest.mark.parametrize("verb", ["generate", "interactive", "validate"])
def test_path_must_be_given(refused, data, verb):
    assert refused(verb, data) == "no checkpoint given; add --path CHECKPOINT"


@pytest.mark.parametrize("verb", ["train", "generate", "interactive", "validate"])
def test_a_missing_data_folder_is_named(refused, checkpoint, verb):
    flags = (
        TRAIN if verb == "train" else ("--path", checkpoint, "--cpu", "--num-workers", 0, "--max-tokens", 400)
    )
    if verb == "validate":  # which takes the data folder of the training where no other is given
        flags = (*flags, "--task", "translation")
    assert refused(verb, "nowhere", *flags).startswith("data folder nowhere does not exist; ")


def test_a_folder_without_data_is_refused(train, refused, tmp_path):
    assert "Could not infer language pair" in refused("train", tmp_path, *TRAIN)


def damaged(kind, checkpoint, folder):
    """A file that is no good checkpoint."""
    path = folder / f"{kind}.pt"
    if kind == "truncated":
        path.write_bytes(checkpoint.read_bytes()[:20000])
    elif kind == "text":
        path.write_text("no checkpoint at all\n")
    elif kind == "empty":
        path.touch()
    elif kind == "foreign":
        torch.save({"weights": torch.zeros(2)}, path)
    elif kind == "pickle":
        torch.save({"model": torch.nn.Linear(2, 2)}, path)
    return path


EXPECTED = {
    "missing": "issing.pt",
    "truncated": "is truncated or not a fairseq checkpoint",
    "text": "is truncated or not a fairseq checkpoint",
    "empty": "is truncated or not a fairseq checkpoint",
    "foreign": "is truncated or not a fairseq checkpoint",
    "pickle": "torch.nn.modules.linear.Linear",
}


@pytest.mark.parametrize("kind", EXPECTED)
@pytest.mark.parametrize(
    "verb", ["train", "generate", "interactive", "validate", "average", "info", "analyse"]
)
def test_a_missing_or_damaged_checkpoint_is_named(refused, train, data, checkpoint, tmp_path, verb, kind):
    path = damaged(kind, checkpoint, tmp_path)
    if verb == "train":
        said = train("--finetune-from-model", path)
    elif verb == "average":
        said = refused(verb, checkpoint, path, "-o", tmp_path / "mean.pt")
    elif verb == "info":
        said = refused(verb, path)
    elif verb == "analyse":
        said = refused(verb, "layers", path, data, "-o", tmp_path / "drawn")
    else:
        said = refused(verb, data, "--path", path, "--cpu", "--num-workers", 0, "--max-tokens", 400)
    assert str(path) in said and EXPECTED[kind] in said
    if kind == "pickle":
        assert "--trust-checkpoint" in said
    assert not (tmp_path / "mean.pt").exists()


@pytest.mark.parametrize("verb", ["train", "generate", "interactive", "validate"])
@pytest.mark.slow
def test_a_dictionary_of_another_size_is_refused(refused, other_data, data, checkpoint, tmp_path, verb):
    sizes = [
        len((folder / "dict.en.txt").read_text("utf-8").splitlines()) + 4 for folder in (other_data, data)
    ]
    if verb == "train":
        said = refused(verb, other_data, *TRAIN, "--restore-file", checkpoint, "--save-dir", tmp_path)
    else:
        said = refused(
            verb,
            other_data,
            "--path",
            checkpoint,
            "--cpu",
            "--num-workers",
            0,
            "--max-tokens",
            400,
            "--gen-subset",
            "valid",
        )
    assert f"the source dictionary has {sizes[0]} entries" in said and str(sizes[1]) in said


def test_a_checkpoint_of_another_size_is_refused(train, checkpoint):
    said = train("--restore-file", checkpoint, "--decoder-layers", 2)
    assert said.startswith("Error(s) in loading state_dict for SurfaceFusionModel: Missing key(s)")
    assert "decoder.layers.1." in said and said.endswith("was the checkpoint trained with other flags?")


@pytest.mark.slow
def test_resuming_with_another_optimizer_is_refused(train, checkpoint):
    assert "--reset-optimizer" in train("--restore-file", checkpoint, "--optimizer", "sgd")


@pytest.mark.slow
def test_an_empty_training_file_is_named(command, refused, data, tmp_path):
    for language in ("en", "ro"):
        (tmp_path / f"empty.{language}").touch()
    argv = ("-s", "en", "-t", "ro", "--trainpref", tmp_path / "empty", "--validpref", TEXT / "valid")
    dictionaries = ("--srcdict", data / "dict.en.txt", "--joined-dictionary", "--destdir", tmp_path / "bin")
    assert command("preprocess", *argv, *dictionaries).status == 0
    said = refused("train", tmp_path / "bin", *TRAIN, "--save-dir", tmp_path / "checkpoints")
    assert "train.en-ro.en" in said and "has no sentences" in said


def test_preprocess_names_a_missing_text_file(refused, tmp_path):
    said = refused(
        "preprocess", "-s", "en", "-t", "ro", "--trainpref", tmp_path / "none", "--destdir", tmp_path
    )
    assert said == f"{tmp_path}/none.en: No such file or directory"


def test_preprocess_does_not_overwrite_dictionaries(refused, data, tmp_path):
    shutil.copy(data / "dict.en.txt", tmp_path)
    argv = [arg for arg in PREPROCESS if arg != "--joined-dictionary"]
    said = refused("preprocess", *argv, "--destdir", tmp_path)
    assert said == f"{tmp_path}/dict.en.txt already exists; remove it or write to another path"


@pytest.mark.parametrize("verb", ["generate", "interactive", "validate"])
@pytest.mark.parametrize("overrides", ["{sf_gate", "sf_gate", "1", ""])
def test_overrides_must_be_a_dictionary(refused, data, checkpoint, verb, overrides):
    said = refused(verb, data, "--path", checkpoint, "--cpu", f"--model-overrides={overrides}")
    assert said.startswith("--model-overrides is not a Python dictionary: ")


def test_values_of_overrides_are_checked(refused, data, checkpoint):
    said = refused("generate", data, "--path", checkpoint, "--cpu", "--model-overrides", "{'sf_gate': 2}")
    assert said.startswith("--sf-gate 2 is outside [0, 1]")


@pytest.mark.slow
def test_a_trusted_checkpoint_may_hold_any_object(command, checkpoint, data, tmp_path, refused):
    state = torch.load(checkpoint, weights_only=True)
    state["extra_state"]["note"] = torch.nn.Linear(2, 2)
    torch.save(state, tmp_path / "unsafe.pt")
    argv = (
        "generate",
        data,
        "--path",
        tmp_path / "unsafe.pt",
        "--cpu",
        "--num-workers",
        0,
        "--max-len-b",
        20,
    )
    assert "torch.nn.modules.linear.Linear" in refused(*argv)
    trusted = command(*argv, "--trust-checkpoint")
    assert trusted.status == 0 and trusted.out.count("\nH-") == 40
    assert "torch.nn.modules.linear.Linear" in refused(*argv), "trust ends with the command"


def raise_inside(kind):
    try:
        raise kind("the line: with a colon")
    except kind:
        raise Exception("what fairseq makes of it")  # noqa: B904


@pytest.fixture
def spawning(train, monkeypatch):
    """Two processes, spawned by fairseq as on a machine of two GPUs."""
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(torch.multiprocessing, "spawn", warm_processes.spawn)
    gloo = ("--distributed-world-size", 2, "--distributed-backend", "gloo", "--ddp-backend", "no_c10d")
    return partial(train, *gloo)


def test_a_user_error_in_a_spawned_process_is_one_line(spawning):
    assert spawning("--sf-idx", 5).startswith("--sf-idx 5 is out of range for 1 decoder layers; ")


def test_bugs_of_spawned_processes_stay_bugs():
    told = "\n\n-- Process 1 terminated with the following error:\nTraceback ...\nKeyError: 'model'\n"
    assert user_line(torch.multiprocessing.ProcessRaisedException(told, 1, 12345)) is None


def test_a_user_error_is_found_in_a_chain_of_exceptions():
    for chain in (SurfaceFusionError, FileNotFoundError):
        with pytest.raises(Exception, match="makes of it") as raised:
            raise_inside(chain)
        assert user_line(raised.value) == "the line: with a colon"
    with pytest.raises(Exception, match="makes of it") as raised:
        raise_inside(KeyError)
    assert user_line(raised.value) is None


def test_a_message_of_two_lines_becomes_one():
    assert user_line(FileNotFoundError("two\nlines")) == "two lines"
