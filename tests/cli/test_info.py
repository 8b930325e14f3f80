"""``surface-fusion info``: the facts of a checkpoint, and versions."""

import json
import platform
from argparse import Namespace

import pytest
import torch

import surface_fusion
from surface_fusion.cli.info import describe_fusion
from surface_fusion.cli.main import main
from tests.helpers.small_training import SIZES


def test_versions(command):
    facts = json.loads(command("info", "--json").out)
    assert facts["surface_fusion"] == surface_fusion.__version__
    assert facts["torch"] == torch.__version__
    assert facts["python"] == platform.python_version()
    assert "fairseq" in facts["fairseq"] and " 0.12" in facts["fairseq"]
    plain = command("info").out
    assert all(str(value) in plain for value in facts.values() if value is not None)


def test_a_checkpoint_of_ours(command, checkpoint, data):
    facts = json.loads(command("info", checkpoint, "--json").out)
    entries = len((data / "dict.en.txt").read_text(encoding="utf-8").splitlines()) + 4
    assert facts["source_dictionary"] == facts["target_dictionary"] == entries
    assert facts["architecture"] == "transformer_surface_fusion"
    assert facts["published_code"] is False and facts["safe_to_load"] is True
    state = torch.load(checkpoint, weights_only=True)
    assert facts["updates"] == state["optimizer_history"][-1]["num_updates"] > 0
    assert facts["best_loss"] == state["extra_state"]["best"]
    # one embedding shared by all, a layer each, and the fusion's attention and feed-forward layer
    d, f = 16, 32
    attention, ffn, norm = 4 * (d * d + d), 2 * d * f + f + d, 2 * d
    assert facts["fusion_parameters"] == attention + ffn
    layers = (attention + ffn + 2 * norm) + (2 * attention + ffn + 3 * norm)
    assert facts["parameters"] == entries * d + layers + attention + ffn


HARD = "of hard fusion's probabilities, which sum to less than 1"


@pytest.mark.parametrize(
    ("metric", "sentence_avg", "words"),
    [
        ("loss", False, f"validation loss, bits per token, with label smoothing, {HARD}"),
        ("loss", True, f"validation loss, bits per sentence, with label smoothing, {HARD}"),
        ("nll_loss", True, f"validation nll_loss, bits per token, {HARD}"),
        ("normalized_nll_loss", True, "validation normalized_nll_loss, bits per token"),
        ("bleu", False, "validation bleu"),
    ],
)
def test_the_best_loss_has_a_name_and_a_unit(command, checkpoint, tmp_path, metric, sentence_avg, words):
    state = torch.load(checkpoint, weights_only=True)
    state["cfg"]["checkpoint"]["best_checkpoint_metric"] = metric
    state["cfg"]["optimization"]["sentence_avg"] = sentence_avg
    torch.save(state, tmp_path / "metric.pt")
    assert json.loads(command("info", tmp_path / "metric.pt", "--json").out)["best_loss_is"] == words
    if metric != "bleu":
        state["cfg"]["model"].sf_renormalize = True
        torch.save(state, tmp_path / "metric.pt")
        said = json.loads(command("info", tmp_path / "metric.pt", "--json").out)["best_loss_is"]
        assert said == words.removesuffix(f", {HARD}")


def test_without_a_validation_there_is_no_best_loss(command, checkpoint, tmp_path):
    state = torch.load(checkpoint, weights_only=True)
    del state["extra_state"]["best"]
    torch.save(state, tmp_path / "unvalidated.pt")
    facts = json.loads(command("info", tmp_path / "unvalidated.pt", "--json").out)
    assert facts["best_loss"] is facts["best_loss_is"] is None


def test_languages_that_no_flag_gave_are_those_of_the_data(command, checkpoint, data, tmp_path):
    state = torch.load(checkpoint, weights_only=True)
    assert state["cfg"]["task"]["source_lang"] is None
    assert json.loads(command("info", checkpoint, "--json").out)["languages"] == "en-ro"
    state["cfg"]["task"]["data"] = "not/here"
    torch.save(state, tmp_path / "moved.pt")
    said = command("info", tmp_path / "moved.pt").out
    assert "not recorded: trained without -s and -t, and its data folder does not exist" in said


def test_an_average_lists_its_files(command, save_dir, checkpoint, tmp_path):
    mean = tmp_path / "mean.pt"
    assert command("average", "--last", 2, save_dir, "-o", mean).status == 0
    assert json.loads(command("info", mean, "--json").out)["averaged"] == ["checkpoint1.pt", "checkpoint2.pt"]
    assert "of 2 files, checkpoint1.pt, checkpoint2.pt; updates and" in command("info", mean).out
    assert json.loads(command("info", checkpoint, "--json").out)["averaged"] is False


def test_plain_text_contains_the_same_facts(command, checkpoint):
    lines = command("info", checkpoint).out.splitlines()
    facts = dict(line.split("  ", 1) for line in lines)
    assert (
        facts["fusion"]
        .strip()
        .startswith("attention (1 head) from decoder layer 1 of 1 to the source embeddings")
    )
    assert "hard, gate 0.8" in facts["fusion"]
    assert facts["published code"].strip() == "no" and facts["safe to load"].strip() == "yes"


@pytest.mark.slow
def test_a_plain_transformer(command, data, tmp_path):
    flags = [
        "--cpu",
        *("--num-workers", "0"),
        "--optimizer",
        "adam",
        "--max-update",
        "1",
        "--max-tokens",
        "400",
        "--save-dir",
        str(tmp_path),
    ]
    assert main(["train", str(data), "-a", "transformer", *map(str, SIZES), *flags]) == 0
    facts = json.loads(command("info", tmp_path / "checkpoint_last.pt", "--json").out)
    assert facts["fusion"] == "none: not a model of surface-fusion"
    assert facts["fusion_parameters"] == 0 and facts["architecture"] == "transformer"


def test_a_checkpoint_of_the_published_code(command, checkpoint, tmp_path):
    state = torch.load(checkpoint, weights_only=True)
    args = Namespace(
        arch="transformer_surface_fusion",
        task="translation",
        source_lang="en",
        target_lang="ro",
        **{"surfacefusion": "mean", "sf_fuision_mode": "hard", "sf_gate": 0.8, "encoder_embed_dim": 16},
        **{"encoder_attention_heads": 2, "decoder_attention_heads": 2, "decoder_layers": 1},
    )
    torch.save({**state, "cfg": None, "args": args}, tmp_path / "published.pt")
    facts = json.loads(command("info", tmp_path / "published.pt", "--json").out)
    assert facts["published_code"] is True and facts["languages"] == "en-ro"
    assert facts["fusion"].startswith(
        "mean of the source embeddings over tokens with id >= 50; without positions; hard"
    )


def test_an_unsafe_checkpoint_is_named_so(command, checkpoint, tmp_path):
    state = torch.load(checkpoint, weights_only=True)
    torch.save({**state, "note": torch.nn.Linear(2, 2)}, tmp_path / "unsafe.pt")
    refused = command("info", tmp_path / "unsafe.pt")
    assert refused.status == 2 and "torch.nn.modules.linear.Linear" in refused.err
    facts = json.loads(command("info", tmp_path / "unsafe.pt", "--trust-checkpoint", "--json").out)
    assert facts["safe_to_load"] is False
    assert facts["unsafe_because"].endswith("which is not on the list of safe classes"), "no advice twice"


@pytest.mark.parametrize(
    "flags, words",
    [
        ({}, "none: a plain Transformer"),
        (
            {"layer_wise_attention": True},
            "none: a plain Transformer; decoder layer i attends to encoder layer i",
        ),
        (
            {"surfacefusion": "att", "sf_attention_heads": 2, "sf_idx": 2, "sf_gate": 0.0, "sf_linear": True},
            "attention (2 heads) from decoder layer 3 of 6 to the source embeddings; without positions; "
            "hard, learned gate; shared feed-forward layer; linear map per branch",
        ),
        (
            {"surfacefusion": "max", "sf_mode": "soft_5", "sf_posedemb": True, "no_sf_ffn": True},
            "max of the source embeddings over all tokens; with positions; soft_5, tau 0.2; "
            "no feed-forward layer",
        ),
        (
            {"surfacefusion": "att", "sf_gate": 0.5, "sf_renormalize": True, "sf_no_detach": True},
            "attention (1 head) from decoder layer 6 of 6 to the source embeddings; without positions; "
            "hard, gate 0.5, renormalised; shared feed-forward layer; gradient into query and key",
        ),
    ],
)
def test_describe_fusion(flags, words):
    assert describe_fusion(Namespace(arch="transformer_surface_fusion", **flags)) == words
