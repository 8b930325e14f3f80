"""No verb runs code from a checkpoint; the error names the refused part.

Tests ``cli/checkpoint_flags.py`` and ``cli/fairseq_verbs.py`` with ``compat/checkpoint_allowlist.py``.
"""

import io
import json
import shutil
import sys
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel
from tests.helpers.pickles import Touching, expression
from tests.helpers.small_training import OPTIMISER, TEXT

GENERATE = ("--cpu", "--num-workers", 0, "--max-len-b", 5, "--beam", 1)
VERBS = ("generate", "interactive", "validate", "average", "analyse", "translate")


def attention_configuration(state: dict[str, Any], marker: Path) -> str:
    """S1."""
    vars(state["cfg"]["model"])["encoder_xformers_att_config"] = expression(marker)
    return "holds code in encoder_xformers_att_config: "


def layers_of_fconv(state: dict[str, Any], marker: Path) -> str:
    """S2."""
    layers = dict.fromkeys(("encoder_layers", "decoder_layers", "decoder_attention"), expression(marker))
    languages = {"task": "translation", "source_lang": "en", "target_lang": "ro", "data": "data-bin"}
    state["args"] = Namespace(arch="fconv", dropout=0.1, criterion="cross_entropy", **languages, **layers)
    state["cfg"] = None
    return "names the model fconv, "


def environment(state: dict[str, Any], marker: Path) -> str:
    state["cfg"]["task"]["left_pad_source"] = "${oc.env:HOME}"
    return "holds the interpolation left_pad_source=${oc.env:HOME}, "


def pickle(state: dict[str, Any], marker: Path) -> str:
    state["note"] = Touching(marker)
    return "wants to run code of posix.system, "


MALICIOUS = (attention_configuration, layers_of_fconv, environment, pickle)


@pytest.fixture
def marker(tmp_path: Path) -> Path:
    """The file that exists if code ran."""
    return tmp_path / "marker"


@pytest.fixture
def changed(checkpoint: Path, tmp_path: Path, data: Path) -> Any:
    """``changed(change, marker)``: a model folder with that checkpoint, and what *change* returned."""

    def make(change: Any, marker: Path) -> tuple[Path, Any]:
        folder = tmp_path / "model"
        folder.mkdir()
        for name in ("dict.en.txt", "dict.ro.txt"):
            shutil.copy(data / name, folder)
        (folder / "spm.model").touch()
        state = torch.load(checkpoint, weights_only=True)
        words = change(state, marker)
        torch.save(state, folder / "checkpoint_best.pt")
        return folder / "checkpoint_best.pt", words

    return make


def command_line(verb: str, path: Path, data: Path, out: Path) -> tuple[object, ...]:
    """Of *verb* on the checkpoint *path*."""
    return {
        "generate": ("generate", data, "--path", path, *GENERATE),
        "interactive": ("interactive", data, "--path", path, *GENERATE),
        "validate": (
            "validate",
            data,
            "--path",
            path,
            "--valid-subset",
            "valid",
            "--cpu",
            "--max-tokens",
            400,
        ),
        "average": ("average", path, "-o", out),
        "analyse": ("analyse", "layers", path, data, "-o", out, "--cpu"),
        "translate": ("translate", path.parent, "--cpu"),
        "info": ("info", path),
    }[verb]


@pytest.mark.parametrize("verb", VERBS)
@pytest.mark.parametrize("change", MALICIOUS, ids=lambda change: change.__name__)
def test_no_verb_runs_code_of_a_checkpoint(
    command: Any,
    changed: Any,
    marker: Path,
    data: Path,
    tmp_path: Path,
    monkeypatch: Any,
    change: Any,
    verb: str,
) -> None:
    path, words = changed(change, marker)
    monkeypatch.setattr(sys, "stdin", io.StringIO("ba de\n"))
    result = command(*command_line(verb, path, data, tmp_path / "out"))
    assert result.status == 2 and not marker.exists() and not (tmp_path / "out").exists()
    said = result.err.splitlines()[-1]
    assert said.startswith(f"surface-fusion {verb}: error: checkpoint {path} {words}")


@pytest.mark.parametrize("change", (attention_configuration, layers_of_fconv), ids=lambda c: c.__name__)
def test_info_says_what_is_not_safe(command: Any, changed: Any, marker: Path, change: Any) -> None:
    path, words = changed(change, marker)
    facts = json.loads(command("info", path, "--json").out)
    assert facts["safe_to_load"] is False and facts["unsafe_because"].startswith(f"it {words.strip(', ')}")
    lines = dict(line.split("  ", 1) for line in command("info", path).out.splitlines())
    assert lines["safe to load"].strip() == "no" and words.strip(", ") in lines["unsafe because"]
    assert not marker.exists()


@pytest.mark.parametrize("change", (environment, pickle), ids=lambda c: c.__name__)
def test_info_refuses_what_it_cannot_read_safely(
    command: Any, changed: Any, marker: Path, change: Any
) -> None:
    path, words = changed(change, marker)
    result = command("info", path)
    assert result.status == 2 and words in result.err and not marker.exists()


@pytest.mark.parametrize("change", MALICIOUS, ids=lambda change: change.__name__)
def test_the_hub_runs_no_code_of_a_checkpoint(changed: Any, marker: Path, data: Path, change: Any) -> None:
    path, words = changed(change, marker)
    with pytest.raises(SurfaceFusionError) as caught:
        SurfaceFusionModel.from_pretrained(str(path.parent), path.name, str(data))
    assert str(caught.value).startswith(f"checkpoint {path} {words}") and not marker.exists()


@pytest.mark.slow
@pytest.mark.parametrize("change", (attention_configuration, layers_of_fconv), ids=lambda c: c.__name__)
def test_plain_fairseq_generate_with_the_plugin_runs_no_code(
    run_fairseq: Any, changed: Any, marker: Path, data: Path, change: Any
) -> None:
    path, words = changed(change, marker)
    done = run_fairseq("generate", data, "--path", path, "--cpu", check=False)
    assert done.returncode != 0 and not marker.exists()
    assert f"SurfaceFusionError: checkpoint {path} {words}" in done.stdout.splitlines()[-1]


def test_the_hub_fetches_nothing_for_a_checkpoint(changed: Any, marker: Path, data: Path) -> None:
    def gpt2(state: dict[str, Any], _: Path) -> None:
        state["cfg"]["bpe"] = {"_name": "gpt2", "gpt2_encoder_json": "http://localhost:1/x"}

    path, _ = changed(gpt2, marker)
    with pytest.raises(SurfaceFusionError, match="names the bpe gpt2"):
        SurfaceFusionModel.from_pretrained(
            str(path.parent), path.name, str(data), bpe="sentencepiece", sentencepiece_model="spm.model"
        )


@pytest.mark.slow
def test_an_architecture_of_the_command_line_is_trained_resumed_and_trusted(
    command: Any, data: Path, tmp_path: Path
) -> None:
    """fconv, which a file may not name: training and resuming take it from the command line."""
    flags = (
        *("-a", "fconv", "--encoder-embed-dim", 8, "--decoder-embed-dim", 8, "--decoder-out-embed-dim", 8),
        *("--encoder-layers", "[(8, 3)] * 2", "--decoder-layers", "[(8, 3)]"),
        *(*OPTIMISER, "--save-dir", tmp_path, "--disable-validation", "--adam-betas", "(0.9, 0.98)"),
    )
    assert command("train", data, *flags, "--max-update", 1).status == 0
    resumed = command("train", data, *flags, "--max-update", 2)
    assert resumed.status == 0 and "Loaded checkpoint" in resumed.out
    path = tmp_path / "checkpoint_last.pt"
    assert torch.load(path, weights_only=True)["optimizer_history"][-1]["num_updates"] == 2
    facts = json.loads(command("info", path, "--json").out)
    assert facts["unsafe_because"] == "it names the model fconv"
    for verb in ("generate", "validate", "average"):
        argv = command_line(verb, path, data, tmp_path / "mean.pt")
        refused = command(*argv)
        assert refused.status == 2 and "names the model fconv, which" in refused.err
        assert command(*argv, "--trust-checkpoint").status == 0


@pytest.mark.slow
def test_a_language_model_is_trained_resumed_and_validated(
    command: Any, tmp_path: Path, monkeypatch: Any
) -> None:
    text = ("--only-source", "--trainpref", TEXT / "train.en", "--validpref", TEXT / "valid.en")
    assert command("preprocess", *text, "--destdir", tmp_path / "lm").status == 0
    flags = (
        *("-a", "transformer_lm", "--task", "language_modeling", "--tokens-per-sample", 32),
        *("--decoder-layers", 1, "--decoder-embed-dim", 8, "--decoder-attention-heads", 2),
        *("--decoder-ffn-embed-dim", 8, *OPTIMISER[:-4], "--save-dir", tmp_path, "--disable-validation"),
    )
    assert command("train", tmp_path / "lm", *flags, "--max-update", 1).status == 0
    resumed = command("train", tmp_path / "lm", *flags, "--max-update", 2)
    assert resumed.status == 0 and "Loaded checkpoint" in resumed.out
    path = tmp_path / "checkpoint_last.pt"
    assert json.loads(command("info", path, "--json").out)["safe_to_load"] is True
    valid = ("--valid-subset", "valid", "--cpu", "--max-tokens", 400, "--task", "language_modeling")
    assert command("validate", tmp_path / "lm", "--path", path, *valid).status == 0
