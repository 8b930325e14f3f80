"""Training and translating with encoder layer fusion from the command line, on real text."""

import contextlib
import io
from pathlib import Path

import pytest
import torch

from surface_fusion.cli.main import main
from tests.helpers.small_training import OPTIMISER, PREPROCESS, SIZES

pytestmark = pytest.mark.slow

MODEL = ("-a", "transformer_surface_fusion", *SIZES, "--encoder-layers", 2)
FAST = ("--optimizer", "flat_adam", "--criterion", "fused_label_smoothed_cross_entropy")
QUICK = ("--max-update", 6, "--log-interval", 3, "--disable-validation", "--no-epoch-checkpoints")


def run(*argv: object) -> str:
    """What a command printed."""
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        assert main([*map(str, argv)]) in (0, None)
    return printed.getvalue()


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("enro") / "data-bin"
    run("preprocess", *PREPROCESS, "--destdir", folder)
    return folder


METHODS = {
    "dwatt": (),
    "fine-grained": ("--encoder-fusion-embedding", "--surfacefusion", "att", "--sf-gate", "0.8"),
    "dlcl": ("--encoder-normalize-before", "--decoder-normalize-before"),
    "routing": ("--surfacefusion", "mean", "--sf-mode", "soft", "--routing-capsules", "4"),
}


@pytest.mark.parametrize("name", METHODS)
def test_train_and_translate(name: str, data: Path, tmp_path: Path) -> None:
    fusion = ("--encoder-fusion", name, *METHODS[name])
    argv = ("train", data, *MODEL, *fusion, *OPTIMISER, *FAST, *QUICK, "--save-dir", tmp_path)
    run(*argv)
    checkpoint = tmp_path / "checkpoint_last.pt"
    before = torch.load(checkpoint, weights_only=False)["model"]
    options = ("--num-workers", 0, "--max-len-b", 10, "--beam", 2, "--cpu")
    outputs = [
        run("generate", data, "--path", checkpoint, *options, *plain)
        for plain in ((), ("--model-overrides", "{'sf_plain': True}"))
    ]
    hypotheses = [[line for line in out.splitlines() if line.startswith("D-")] for out in outputs]
    assert hypotheses[0] and [h.split("\t")[2] for h in hypotheses[0]] == [
        h.split("\t")[2] for h in hypotheses[1]
    ]
    assert name in run("info", checkpoint)
    run(*argv, "--max-update", 8)  # resumes
    after = torch.load(checkpoint, weights_only=False)["model"]
    moved = [key for key in before if key.startswith(("encoder.fusion", "encoder.combination"))]
    assert moved and any(not before[key].equal(after[key]) for key in moved)


def test_a_plain_model_is_trained_further(data: Path, tmp_path: Path) -> None:
    """The loss of the first update is the plain model's."""
    exact = ("--dropout", 0, "--attention-dropout", 0)
    plain = ("train", data, *MODEL, *OPTIMISER, *FAST, *QUICK, *exact)
    run(*plain, "--save-dir", tmp_path / "plain")
    source = ("--finetune-from-model", tmp_path / "plain" / "checkpoint_last.pt", "--max-update", 1)
    once = (*source, "--log-interval", 1, "--log-format", "json")
    logs = [
        run(*plain, *once, *fusion, "--save-dir", tmp_path / str(i))
        for i, fusion in enumerate([(), ("--encoder-fusion", "dwatt"), ("--encoder-fusion", "concat")])
    ]
    losses = [
        next(
            line.partition('"loss": ')[2].split(",")[0] for line in log.splitlines() if "train_inner" in line
        )
        for log in logs
    ]
    assert losses[0] == losses[1] == losses[2]
