"""Methods that a user registers: in Python, and from a plugin folder as docs/adding_a_method.md shows it."""

import argparse
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from surface_fusion import SurfaceFusionModel
from surface_fusion.decoding.eligibility import why_not_fast
from surface_fusion.encoder_fusion import (
    Average,
    Combination,
    EncoderFusion,
    LayerAttention,
    methods,
    options_of,
    register_encoder_fusion,
)
from surface_fusion.encoder_fusion.registry import _methods
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.packed.batch import pack
from surface_fusion.packed.eligibility import why_not_packed
from surface_fusion.packed.flat_parameters import FlatParameters
from surface_fusion.packed.step import PackedStep
from surface_fusion.packed.transformer import PackedTransformer
from tests.helpers import warm_processes
from tests.helpers.paths import ROOT
from tests.helpers.small_training import OPTIMISER, SIZES
from tests.helpers.tiny import PAD, assert_incremental_equals_full, batch, build, log_probs, loss, shaken

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


def test_a_registered_method_is_built_with_its_options(mine: type[EncoderFusion]) -> None:
    assert options_of(mine) == {"scale": 1.0, "kind": "a", "top": 1}
    model, _ = build("--encoder-fusion", "mine", "--encoder-fusion-options", "scale=2, kind=b,top=2")
    fusion = model.encoder.fusion
    assert type(fusion) is mine and (fusion.scale, fusion.kind, fusion.top) == (2.0, "b", 2)
    assert type(fusion.scale) is float
    assert log_probs(model.eval(), batch()).isfinite().all()


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ("width=3", "mine takes KEY=VALUE,KEY=VALUE of scale=1.0, kind='a', top=1"),
        (
            "scale",
            "--encoder-fusion-options scale: --encoder-fusion mine takes KEY=VALUE,KEY=VALUE of ",
        ),
        ("top=1,top=2", "--encoder-fusion-options top=1,top=2: --encoder-fusion mine takes KEY=VALUE"),
        ("top=open('x')", "--encoder-fusion-options top=open('x'): --encoder-fusion mine takes KEY=VALUE"),
        ("top=1.5", "--encoder-fusion-options top=1.5: give a value of type int, such as 1"),
        ("top=17", "top 17 is more than 16"),
    ],
)
def test_invalid_options_are_named(mine: type[EncoderFusion], options: str, text: str) -> None:
    with pytest.raises(SurfaceFusionError, match=re.escape(text)):
        build("--encoder-fusion", "mine", "--encoder-fusion-options", options)


@pytest.mark.parametrize(
    "options",
    ["{[]:1}", "opt={[]:1}", "opt={{}}", "opt=" + "-" * 3000 + "1", "opt=1" + "+1" * 50000, "f(1)=2", "*a"],
    ids=lambda text: text[:12],
)
def test_options_that_python_cannot_parse_are_one_line(mine: type[EncoderFusion], options: str) -> None:
    with pytest.raises(SurfaceFusionError, match=r"--encoder-fusion-options .*: --encoder-fusion mine takes"):
        build("--encoder-fusion", "mine", "--encoder-fusion-options", options)


def test_an_integer_too_large_for_an_option_is_refused(mine: type[EncoderFusion]) -> None:
    name = next(name for name, default in options_of(mine).items() if type(default) is float)
    with pytest.raises(SurfaceFusionError, match="give a value of type float"):
        build("--encoder-fusion", "mine", "--encoder-fusion-options", f"{name}={'9' * 400}")


def test_an_option_named_like_a_flag_of_the_model_is_an_option() -> None:
    @register_encoder_fusion("attention")
    class Attention(Average):
        def __init__(self, states: int, dim: int, dropout: float = 0.3) -> None:
            super().__init__(states, dim)
            self.rate = dropout

    try:
        flags = ("--encoder-fusion", "attention", "--encoder-fusion-options", "dropout=0.2")
        assert build(*flags)[0].encoder.fusion.rate == 0.2
    finally:
        del _methods["attention"]


def test_arguments_of_a_base_class_are_no_options() -> None:
    class Mix(LayerAttention):
        def __init__(
            self, states: int, dim: int, layers: int, dropout: float = 0.3, own: int = 1, **shared: Any
        ) -> None:
            super().__init__(states, dim, layers, False, dropout=dropout, **shared)

    assert options_of(Mix) == {"own": 1}


@pytest.mark.parametrize("name", ["Bad Name!", "", "a--b"])
def test_names_are_words_with_hyphens(name: str) -> None:
    with pytest.raises(SurfaceFusionError, match="give lower-case words separated by hyphens"):
        register_encoder_fusion(name)


def test_a_class_has_one_name_and_is_a_method(mine: type[EncoderFusion]) -> None:
    with pytest.raises(SurfaceFusionError, match="is registered as mine; derive a class from it"):
        register_encoder_fusion("mine-again")(mine)
    assert mine.name == "mine" and "mine-again" not in methods()
    not_a_class: Any = lambda states: states  # noqa: E731
    with pytest.raises(SurfaceFusionError, match="is not derived from EncoderFusion"):
        register_encoder_fusion("function")(not_a_class)


def test_extra_layers_cannot_be_derived_from() -> None:
    with pytest.raises(TypeError, match="ExtraLayers is not a module"):
        type("Derived", (methods()["extra-layers"],), {})


def test_an_option_with_a_flag_of_its_own_has_one_spelling() -> None:
    with pytest.raises(SurfaceFusionError, match="bottleneck=4: --encoder-fusion dwatt takes no options"):
        build("--encoder-fusion", "dwatt", "--encoder-fusion-options", "bottleneck=4")


@register_encoder_fusion("test-mix")
class Mix(LayerAttention):
    """The same mix for all decoder layers."""

    def __init__(self, states: int, dim: int, decoder_layers: int, sharp: int = 1, **shared: Any) -> None:
        super().__init__(states, dim, decoder_layers, channels=False, **shared)
        self.sharp = sharp

    def layer_weights(self) -> Tensor:
        return (self.sharp * self.weight[:1]).softmax(1).expand_as(self.weight)


@register_encoder_fusion("test-gates")
class Gates(Combination):
    """The latest output and a gate's share of the one before it."""

    def __init__(self, layers: int, dim: int, before: bool, embedding: bool, bound: float = 1.0) -> None:
        super().__init__(layers, dim, before, embedding)
        self.bound = bound
        self.gates = nn.ModuleList(nn.Linear(dim, 1) for _ in range(layers + 1))

    def combine(self, kept: list[Tensor], depth: int) -> Tensor:
        if len(kept) < 2:
            return kept[-1]
        return kept[-1] + self.bound * self.gates[depth](kept[-1]).sigmoid() * kept[-2]


OTHER_PLACES = {name: _methods.pop(name) for name in ("test-mix", "test-gates")}


@pytest.mark.parametrize("name", OTHER_PLACES)
def test_methods_that_act_elsewhere(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Trained without padding, decoded on the fast path."""
    monkeypatch.setitem(_methods, name, OTHER_PLACES[name])
    options = {"test-mix": "sharp=2", "test-gates": "bound=.5"}[name]
    model = shaken("--encoder-fusion", name, "--encoder-fusion-options", options, "--ta-dropout", "0")
    used = model.encoder.fusion.sharp == 2 if name == "test-mix" else model.decoder.combination.bound == 0.5
    assert used and why_not_fast(model.decoder) is None
    assert_incremental_equals_full(model)
    expected = loss(model, batch()).item()
    flat = FlatParameters.of(model.parameters())
    assert why_not_packed(model) is None
    packed = PackedTransformer(model, flat)
    packed.training = False
    net, target = batch()["net_input"], batch()["target"]
    found, _ = PackedStep(packed, 0.0, ignore_prefix_size=0).forward(
        pack(net["src_tokens"], net["prev_output_tokens"], target, PAD)
    )
    assert found.loss.item() == pytest.approx(expected, rel=1e-5)


def test_the_help_lists_a_registered_method(
    mine: type[EncoderFusion], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "10000")  # else lines end at the hyphens of names
    parser = argparse.ArgumentParser()
    SurfaceFusionModel.add_args(parser)
    text = " ".join(parser.format_help().split())
    on_the_output = "average, concat, dwatt, extra-layers, lstm, representation, routing, mine"
    assert f"on the encoder's output: {on_the_output}; a mix for each decoder layer: fine-grained, tr" in text
    assert "transparent; inside both stacks: dense, dlcl; default: the last layer only" in text


def test_a_name_can_be_registered_once(mine: type[EncoderFusion]) -> None:
    with pytest.raises(SurfaceFusionError, match=r"average is .*\.Average already; .*Mine under"):
        register_encoder_fusion("average")(mine)
    register_encoder_fusion("average")(Average)  # a reload
    with pytest.raises(SurfaceFusionError, match="Linear is not derived from EncoderFusion"):
        register_encoder_fusion("linear")(nn.Linear)  # type: ignore[type-var]
    assert methods()["average"] is Average


def test_a_checkpoint_of_an_unregistered_method_is_refused_with_a_remedy() -> None:
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
    verb = program.removeprefix("fairseq-")
    fairseqs = program != "surface-fusion"
    entry_point = f"fairseq_cli.{verb}:cli_main" if fairseqs else warm_processes.SURFACE_FUSION
    argv = [str(data) if word == "DATA" else word for word in rest]
    more = (*TINY[program], *more)
    done = warm_processes.run(entry_point, *argv, *more, cwd=folder, merge=True)
    assert done.returncode == 0, done.stdout[-5000:]
    return done.stdout


@pytest.mark.slow
def test_the_documented_method_is_trained_decoded_and_analysed(plugin: Path, data: Path) -> None:
    train, generate, analyse = COMMANDS
    assert "without padding, on the CPU" in run(plugin, data, train)
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
