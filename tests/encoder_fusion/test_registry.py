"""Methods that a user registers: in Python, and from a plugin folder as docs/adding_a_method.md shows it."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from surface_fusion import SurfaceFusionModel
from surface_fusion.encoder_fusion import Average, EncoderFusion, methods, options_of, register_encoder_fusion
from surface_fusion.encoder_fusion.registry import _methods
from surface_fusion.errors import SurfaceFusionError
from tests.helpers.paths import ROOT
from tests.helpers.small_training import OPTIMISER, SIZES
from tests.helpers.tiny import batch, build, log_probs

PAGE = (ROOT / "docs" / "adding_a_method.md").read_text(encoding="utf-8")
(CODE,) = re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL)
COMMANDS = [
    shlex.split(command)
    for block in re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    for command in block.replace("\\\n", "").splitlines()
]
TINY = {
    "fairseq-train": (
        *(*SIZES, *OPTIMISER[: OPTIMISER.index("--optimizer")], "--encoder-layers", 2, "--num-workers", 0),
        *("--lr", 0.005, "--max-tokens", 400, "--max-update", 3, "--disable-validation"),
    ),
    "fairseq-generate": ("--cpu", "--num-workers", 0, "--max-len-b", 10, "--gen-subset", "valid"),
    "surface-fusion": ("--cpu", "--split", "valid", "--beam", 1),
}
"""What makes the page's commands small enough for a test."""


@pytest.fixture
def mine() -> Iterator[type[EncoderFusion]]:
    """A method with options, registered for the time of a test."""

    @register_encoder_fusion("mine")
    class Mine(EncoderFusion):
        """The last state, scaled."""

        def __init__(self, states: int, dim: int, scale: float = 1.0, kind: str = "a", top: int = 1) -> None:
            super().__init__(states, dim)
            self.scale, self.kind, self.top = scale, kind, top

        @classmethod
        def check_options(cls, dim: int, **options: Any) -> None:
            if options["top"] > dim:
                raise ValueError(f"top {options['top']} is more than {dim}")

        def forward(self, states: list[Tensor]) -> Tensor:
            return self.scale * states[-self.top]

    yield Mine
    del _methods["mine"]


def test_it_is_built_with_its_options(mine: type[EncoderFusion]) -> None:
    assert options_of(mine) == {"scale": 1.0, "kind": "a", "top": 1}
    model, _ = build("--encoder-fusion", "mine", "--encoder-fusion-options", "scale=2, kind=b,top=2")
    fusion = model.encoder.fusion
    assert type(fusion) is mine and (fusion.scale, fusion.kind, fusion.top) == (2.0, "b", 2)
    assert type(fusion.scale) is float
    assert log_probs(model.eval(), batch()).isfinite().all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        (
            "width=3",
            "--encoder-fusion-options width=3: --encoder-fusion mine takes KEY=VALUE for scale=",
        ),
        (
            "scale",
            "--encoder-fusion-options scale: --encoder-fusion mine takes KEY=VALUE for scale=1.0, ",
        ),
        ("top=1.5", "--encoder-fusion-options top=1.5: give a value of type int, such as 1"),
        ("top=17", "top 17 is more than 16"),
    ],
)
def test_wrong_options_are_named(mine: type[EncoderFusion], options: str, text: str) -> None:
    with pytest.raises(SurfaceFusionError, match=re.escape(text)):
        build("--encoder-fusion", "mine", "--encoder-fusion-options", options)


def test_an_option_with_a_flag_of_its_own_has_one_spelling() -> None:
    with pytest.raises(SurfaceFusionError, match=r"bottleneck=4: --encoder-fusion dwatt takes .* none"):
        build("--encoder-fusion", "dwatt", "--encoder-fusion-options", "bottleneck=4")


def test_the_help_lists_it(mine: type[EncoderFusion], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "10000")  # else lines end at the hyphens of names
    parser = argparse.ArgumentParser()
    SurfaceFusionModel.add_args(parser)
    text = " ".join(parser.format_help().split())
    on_the_output = "average, concat, dwatt, extra-layers, lstm, representation, routing, mine"
    assert f"on the encoder's output: {on_the_output}; a mix for each decoder layer: fine-grained, tr" in text
    assert "transparent; inside both stacks: dense, dlcl; default: the last layer only" in text


def test_a_name_is_taken_once(mine: type[EncoderFusion]) -> None:
    with pytest.raises(SurfaceFusionError, match=r"average is .*\.Average already; .*Mine under"):
        register_encoder_fusion("average")(mine)
    register_encoder_fusion("average")(Average)  # a reload
    assert methods()["average"] is Average


def test_an_unregistered_method_of_a_checkpoint_says_what_to_do() -> None:
    with pytest.raises(SurfaceFusionError, match="or import the module that registers it"):
        build("--encoder-fusion", "scalar-mix")


@pytest.fixture(scope="module")
def plugin(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder in which the page's commands can be run."""
    folder = tmp_path_factory.mktemp("plugin")
    (folder / "my_fusion").mkdir()
    (folder / "my_fusion" / "__init__.py").write_text(CODE)
    return folder


def run(folder: Path, data: Path, command: list[str], *more: object) -> str:
    program, *rest = command
    argv = [str(data) if word == "DATA" else word for word in rest]
    more = (*TINY[program], *more)
    done = subprocess.run(
        [str(Path(sys.executable).with_name(program)), *argv, *map(str, more)],
        cwd=folder,
        env={"PYTHONPATH": str(ROOT), "PATH": "/usr/bin:/bin", "OMP_NUM_THREADS": "1", "HOME": str(folder)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


def test_the_pages_method_is_trained_decoded_and_analysed(plugin: Path, data: Path) -> None:
    train, generate, analyse = COMMANDS
    assert "fused_label_smoothed_cross_entropy: training without padding" in run(plugin, data, train)
    state = torch.load(plugin / "checkpoints" / "checkpoint_last.pt", weights_only=False)["model"]
    assert state["encoder.fusion.weight"].shape == (2,) and state["encoder.fusion.weight"].ne(0).any()
    fast = run(plugin, data, generate)
    plain = run(plugin, data, generate, "--model-overrides", "{'sf_plain': True}")
    hypotheses = [re.findall(r"^D-\d+\t\S+\t(.*)$", out, re.M) for out in (fast, plain)]
    assert hypotheses[0] and hypotheses[0] == hypotheses[1]
    assert "decoding by fairseq's modules" not in fast and "decoding by fairseq's modules" in plain
    run(plugin, data, analyse)
    rows = (plugin / "analysis" / "layers.csv").read_text().splitlines()[1:]
    assert sum(float(row.split(",")[-1]) for row in rows) == pytest.approx(1)
    assert len((plugin / "analysis" / "ablation.csv").read_text().splitlines()) == 1 + 3
