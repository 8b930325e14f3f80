"""A model trained by the published code goes on translating, scoring and training as it did there.

Through fairseq's own console commands, each in a process of its own. Scores and log-probabilities
agree within 1e-4.
"""

import json
import logging
import math
import re
import shutil
from argparse import Namespace
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from fairseq.checkpoint_utils import load_model_ensemble_and_task
from torch import Tensor

from surface_fusion import SurfaceFusionError
from tests.conftest import RunFairseq
from tests.helpers.paths import REFERENCE
from tests.helpers.published import assert_near, losses, save_legacy

TRANSLATE = ("--beam", 4, "--lenpen", 1.0, "--remove-bpe")
# The flags of its training (no --user-dir: run_fairseq adds it).
TRAIN = (
    *("--arch", "transformer_surface_fusion", "--share-all-embeddings"),
    *("--surfacefusion", "att", "--sf-gate", 0.8, "--sf-mode", "hard", "--sf-idx", 2),
    *("--encoder-layers", 3, "--encoder-embed-dim", 32, "--encoder-ffn-embed-dim", 64),
    *("--decoder-layers", 3, "--decoder-embed-dim", 32, "--decoder-ffn-embed-dim", 64),
    *("--encoder-attention-heads", 4, "--decoder-attention-heads", 4, "--dropout", 0.3),
    *("--optimizer", "adam", "--adam-betas", "(0.9, 0.98)", "--lr", 0.005, "--min-lr", 1e-09),
    *("--lr-scheduler", "inverse_sqrt", "--warmup-updates", 200, "--warmup-init-lr", 1e-07),
    *("--criterion", "label_smoothed_cross_entropy", "--label-smoothing", 0.1, "--max-tokens", 1024),
    *("--seed", 333, "--cpu", "--num-workers", 0, "--max-update", 2, "--no-epoch-checkpoints"),
    *("--log-format", "json", "--log-interval", 1),
)
FUSION = ("decoder.sf_attn.", "decoder.fc1.", "decoder.fc2.")
NEVER_USED = ("decoder.meanmaxweight", "decoder.tgt_out_dim.weight", "decoder.src_out_dim.weight")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return shutil.copytree(REFERENCE / "data-bin", tmp_path_factory.mktemp("reference") / "data-bin")


@pytest.fixture
def state() -> dict[str, Any]:
    """The checkpoint as a dictionary, to be changed by a test."""
    return torch.load(REFERENCE / "checkpoint_best.pt")


def lines(text: str, kind: str) -> dict[int, list[list[str]]]:
    """Columns of the lines ``KIND-ID\\t...`` by sentence, in their order."""
    found = defaultdict(list)
    for sentence, columns in re.findall(rf"^{kind}-(\d+)\t(.*)$", text, flags=re.MULTILINE):
        found[int(sentence)].append(columns.split("\t"))
    return found


def assert_same_hypotheses(ours: str, published: str) -> None:
    """The same texts, hypothesis by hypothesis, and scores within 1e-4, for all 150 test sentences."""
    ours_by_id, published_by_id = lines(ours, "H"), lines(published, "H")
    assert published_by_id.keys() == set(range(150))
    assert ours_by_id.keys() == published_by_id.keys()
    for sentence, expected in published_by_id.items():
        assert [text for _, text in ours_by_id[sentence]] == [text for _, text in expected], sentence
        for (score, _), (expected_score, _) in zip(ours_by_id[sentence], expected, strict=True):
            assert float(score) == pytest.approx(float(expected_score), abs=1e-4), sentence


def load(path: Path, data: Path, **overrides: Any) -> tuple[Any, Any]:
    """The model in eval mode and its task, by fairseq's own function."""
    overrides |= {"data": str(data)}
    (model,), _, task = load_model_ensemble_and_task([str(path)], arg_overrides=overrides)
    return model.eval(), task


@pytest.mark.slow
@pytest.mark.parametrize("batch_size", [1, 150])
def test_generate(run_fairseq: RunFairseq, data: Path, batch_size: int) -> None:
    checkpoint = REFERENCE / "checkpoint_best.pt"
    done = run_fairseq("generate", data, "--path", checkpoint, *TRANSLATE, "--batch-size", batch_size)
    published = (REFERENCE / "generate_beam4_lenpen1.txt").read_text()
    assert_same_hypotheses(done.stdout, published)
    for sentence, [[positional]] in lines(published, "P").items():
        [[ours]] = lines(done.stdout, "P")[sentence]
        # Printed with four digits, of which the last may be rounded the other way.
        assert np.allclose(np.array(ours.split(), float), np.array(positional.split(), float), 0, 2e-4)
    assert done.stdout.splitlines()[-1] == published.splitlines()[-1]
    assert "BLEU4 = 64.91" in published.splitlines()[-1]
    dropped = [line for line in done.stdout.splitlines() if all(name in line for name in NEVER_USED)]
    assert len(dropped) == 1
    assert "--reset-optimizer" in dropped[0]


@pytest.mark.slow
def test_n_best(run_fairseq: RunFairseq, data: Path) -> None:
    checkpoint = REFERENCE / "checkpoint_best.pt"
    done = run_fairseq("generate", data, "--path", checkpoint, "--beam", 4, "--nbest", 4, "--batch-size", 150)
    published = (REFERENCE / "nbest4.txt").read_text()
    assert all(len(hypotheses) == 4 for hypotheses in lines(published, "H").values())
    assert_same_hypotheses(done.stdout, published)


@pytest.mark.slow
def test_score_reference(run_fairseq: RunFairseq, data: Path) -> None:
    checkpoint = REFERENCE / "checkpoint_best.pt"
    done = run_fairseq("generate", data, "--path", checkpoint, "--score-reference", "--remove-bpe")
    assert_same_hypotheses(done.stdout, (REFERENCE / "score_reference.txt").read_text())


def test_teacher_forced(data: Path) -> None:
    model, task = load(REFERENCE / "checkpoint_best.pt", data)
    with np.load(REFERENCE / "teacher_forced_first16.npz") as npz:
        expected = {key: torch.from_numpy(npz[key]) for key in npz.files}

    def forward(sample: dict[str, Any]) -> Tensor:
        with torch.no_grad():
            return model.get_normalized_probs(model(**sample["net_input"]), log_probs=True)

    task.load_dataset("test")
    dataset = task.dataset("test")
    batch = dataset.collater([dataset[int(i)] for i in expected["id"]])
    assert torch.equal(batch["target"], expected["target"])
    log_probs = forward(batch)
    assert_near(log_probs, expected["log_probs"])
    for ours, key in zip(losses(log_probs.double(), batch["target"]), ("loss", "nll_loss"), strict=True):
        assert_near(ours, expected[key])

    everything = dataset.collater([dataset[i] for i in range(len(dataset))])
    assert everything["ntokens"] == expected["testset_ntokens"]
    sums = losses(forward(everything).double(), everything["target"])
    for ours, key in zip(sums, ("testset_loss_sum", "testset_nll_sum"), strict=True):
        # 1,338 tokens, on average much closer than 1e-6 each.
        assert_near(ours, expected[key], atol=1e-3)


@pytest.mark.slow
def test_validate(run_fairseq: RunFairseq, data: Path) -> None:
    """fairseq-validate insists on a task, and reports bits a token with three digits."""
    done = run_fairseq(
        *("validate", data, "--task", "translation", "--path", REFERENCE / "checkpoint_best.pt"),
        *("--valid-subset", "test", "--batch-size", 150, "--log-format", "json"),
    )
    with np.load(REFERENCE / "teacher_forced_first16.npz") as npz:
        expected = npz["testset_nll_sum"] / npz["testset_ntokens"] / math.log(2)
    [reported] = re.findall(r'"test_nll_loss": "([\d.]+)"', done.stdout)
    assert float(reported) == pytest.approx(expected, abs=5.1e-4)


def train_log(output: str, what: str) -> list[dict[str, Any]]:
    """The JSON records of fairseq-train's log: *what* is train_inner, train or valid."""
    return [json.loads(found) for found in re.findall(rf"\| {what} \| (\{{.*\}})$", output, re.MULTILINE)]


@pytest.mark.slow
def test_resume(run_fairseq: RunFairseq, data: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    """--reset-optimizer is enough; the schedule starts anew, the place in the data is kept."""
    done = run_fairseq(
        *("train", data, *TRAIN, "--restore-file", REFERENCE / "checkpoint_best.pt", "--reset-optimizer"),
        *("--save-dir", tmp_path),
    )
    first, second = train_log(done.stdout, "train_inner")
    assert [first["num_updates"], second["num_updates"]] == ["1", "2"]
    position = state["extra_state"]["train_iterator"]
    assert first["epoch"] == position["epoch"] == 33
    # A fresh model starts at log2(128) = 7 bits; the last updates of the published training were at 2.1.
    assert 1.8 < float(first["loss"]) < 2.4
    # Two updates of the warm-up change nothing; fairseq's newer smoothing excludes the target from the
    # uniform part, which adds about eps / V (mean over the vocabulary - nll) = 0.008 bits.
    [valid] = train_log(done.stdout, "valid")
    assert float(valid["valid_loss"]) == pytest.approx(state["extra_state"]["val_loss"] + 0.008, abs=0.004)
    assert (tmp_path / "checkpoint_last.pt").exists()


@pytest.mark.slow
def test_resume_needs_reset_optimizer(run_fairseq: RunFairseq, data: Path, tmp_path: Path) -> None:
    done = run_fairseq(
        *("train", data, *TRAIN, "--restore-file", REFERENCE / "checkpoint_best.pt"),
        *("--save-dir", tmp_path),
        check=False,
    )
    assert done.returncode != 0
    assert re.search(r"dropped 3 parameters .* add --reset-optimizer", done.stdout)
    assert re.search(r"SurfaceFusionError: the optimizer state in .* add --reset-optimizer", done.stdout)


@pytest.mark.slow
def test_finetune_from_a_plain_transformer(
    run_fairseq: RunFairseq, data: Path, tmp_path: Path, state: dict[str, Any]
) -> None:
    for name in [name for name in state["model"] if name.startswith((*FUSION, *NEVER_USED))]:
        del state["model"][name]
    state["args"] = Namespace(**{k: v for k, v in vars(state["args"]).items() if not k.startswith("sf_")})
    del state["args"].surfacefusion
    state["args"].arch = "transformer"
    save_legacy(state, tmp_path / "plain.pt")
    done = run_fairseq(
        *("train", data, *TRAIN, "--finetune-from-model", tmp_path / "plain.pt", "--save-dir", tmp_path)
    )
    [line] = [line for line in done.stdout.splitlines() if "has no surface fusion" in line]
    assert "12 fusion parameters keep their initial values" in line
    assert "decoder.sf_attn.q_proj.weight" in line
    updates = train_log(done.stdout, "train_inner")
    assert [update["num_updates"] for update in updates] == ["1", "2"]
    assert all(math.isfinite(float(update["loss"])) for update in updates)


@pytest.mark.slow
def test_unused_parameters_are_dropped_with_one_line(data: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "surface_fusion"):
        model, _ = load(REFERENCE / "checkpoint_best.pt", data)
    [message] = [r.getMessage() for r in caplog.records if r.name.startswith("surface_fusion")]
    assert all(name in message for name in NEVER_USED)
    assert "--reset-optimizer" in message
    assert not set(NEVER_USED) & model.state_dict().keys()


@pytest.mark.parametrize(
    "missing", [["decoder.sf_attn.out_proj.bias"], ["decoder.sf_attn.q_proj.weight", "decoder.fc2.bias"]]
)
def test_missing_fusion_parameters_are_named(
    data: Path, tmp_path: Path, state: dict[str, Any], missing: list[str]
) -> None:
    for name in missing:
        del state["model"][name]
    save_legacy(state, tmp_path / "checkpoint.pt")
    with pytest.raises(SurfaceFusionError, match=f"lacks .* {re.escape(', '.join(missing))}; give the flags"):
        load(tmp_path / "checkpoint.pt", data)


@pytest.mark.slow
def test_a_mismatched_shape_is_named(data: Path, tmp_path: Path, state: dict[str, Any]) -> None:
    weights = state["model"]
    weights["decoder.sf_attn.k_proj.weight"] = weights["decoder.sf_attn.k_proj.weight"][:, :16]
    save_legacy(state, tmp_path / "checkpoint.pt")
    with pytest.raises(SurfaceFusionError, match=r"sf_attn\.k_proj\.weight .*\(32, 16\).*\(32, 32\)"):
        load(tmp_path / "checkpoint.pt", data)


@pytest.mark.slow
def test_another_dictionary_is_refused_with_both_sizes(data: Path, tmp_path: Path) -> None:
    other = shutil.copytree(data, tmp_path / "data-bin")
    for language in ("en", "xx"):
        with (other / f"dict.{language}.txt").open("a") as file:
            file.write("another 1\n")
    with pytest.raises(SurfaceFusionError, match=r"dictionary has 129 entries .* trained with 128"):
        load(REFERENCE / "checkpoint_best.pt", other)


@pytest.mark.slow
def test_the_trainer_reports_the_cause_of_a_failed_load(
    run_fairseq: RunFairseq, data: Path, tmp_path: Path, state: dict[str, Any]
) -> None:
    del state["model"]["decoder.sf_attn.out_proj.bias"]
    save_legacy(state, tmp_path / "checkpoint.pt")
    done = run_fairseq(
        *("train", data, *TRAIN, "--restore-file", tmp_path / "checkpoint.pt", "--reset-optimizer"),
        *("--save-dir", tmp_path),
        check=False,
    )
    assert done.returncode != 0
    assert re.search(r"lacks the fusion parameters decoder\.sf_attn\.out_proj\.bias;", done.stdout)
