"""``surface-fusion analyse`` from the command line, on a checkpoint trained for a few updates."""

import csv
import re
from pathlib import Path

import pytest

from surface_fusion.cli.main import main
from tests.helpers.small_training import OPTIMISER, PREPROCESS, SIZES

FAST = ("--optimizer", "flat_adam", "--criterion", "fused_label_smoothed_cross_entropy")
TRAINING = (
    *("-a", "transformer_surface_fusion", *SIZES, "--encoder-layers", 2, "--decoder-layers", 2),
    *("--encoder-fusion", "fine-grained", "--encoder-fusion-embedding", *OPTIMISER, *FAST),
    *("--surfacefusion", "att", "--sf-gate", 0.8),
    *("--max-update", 10, "--disable-validation", "--no-epoch-checkpoints"),
)


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A checkpoint and its data."""
    folder = tmp_path_factory.mktemp("analyse")
    assert main([*map(str, ("preprocess", *PREPROCESS, "--destdir", folder / "data"))]) == 0
    assert main([*map(str, ("train", folder / "data", *TRAINING, "--save-dir", folder))]) == 0
    return folder / "checkpoint_last.pt", folder / "data"


def rows(path: Path) -> list[dict[str, str]]:
    with open(path, encoding="utf-8") as file:
        return list(csv.DictReader(file))


@pytest.mark.slow
def test_layers(trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "new" / "folder"
    assert main(["analyse", "layers", *map(str, trained), "-o", str(out)]) == 0
    names = ["layers.csv", "layers.png", "layers.svg", "report.html"]
    assert capsys.readouterr().out.split() == [str(out / name) for name in names]
    assert sorted(path.name for path in out.iterdir()) == names
    found = rows(out / "layers.csv")
    assert [(row["layer"], row["read_by"]) for row in found] == [
        (layer, column) for layer in ("Emb", "1", "2") for column in ("1", "2")
    ]
    assert sum(float(row["weight"]) for row in found) == pytest.approx(2, abs=1e-4)
    assert (out / "layers.png").read_bytes().startswith(b"\x89PNG")


def test_ablate(trained: tuple[Path, Path], tmp_path: Path) -> None:
    flags = ("--beam", "1", "--cpu", "--remove-bpe", "sentencepiece", "-o", str(tmp_path))
    assert main(["analyse", "ablate", *map(str, trained), *flags]) == 0
    found = rows(tmp_path / "ablation.csv")
    assert [row["silenced"] for row in found] == ["none", "Emb", "1", "2"]
    assert found[0]["length_change_percent"] == "0.00" and int(found[0]["tokens"]) > 40
    assert "tok:13a" in found[0]["signature"]
    assert (tmp_path / "ablation.svg").read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.slow
def test_embeddings(trained: tuple[Path, Path], tmp_path: Path) -> None:
    argv = ["analyse", "embeddings", *map(str, trained), "-o", str(tmp_path)]
    assert main([*argv, "--against", str(trained[0])]) == 0
    found = rows(tmp_path / "singular_values.csv")
    curves: dict[str, list[float]] = {}
    for row in found:
        curves.setdefault(row["matrix"], []).append(float(row["log_ratio"]))
    assert list(curves) == ["source", "target", "source, other model", "target, other model"]
    assert curves["source"] == curves["source, other model"] != curves["target"]
    for curve in curves.values():
        assert len(curve) == 16 and curve[0] == 0 and curve == sorted(curve, reverse=True)
    near = rows(tmp_path / "neighbours.csv")
    assert [row["rank"] for row in near[:5]] == ["1", "2", "3", "4", "5"]
    # The dictionary is joined: no word is its own translation.
    assert not [row for row in near if row["source"] == row["target"]]
    assert all(float(row["cosine"]) < 0.999 for row in near)
    assert {row["side"] for row in rows(tmp_path / "pca.csv")} == {"source", "target"}


def test_branches(trained: tuple[Path, Path], tmp_path: Path) -> None:
    assert main(["analyse", "branches", *map(str, trained), "-o", str(tmp_path)]) == 0
    found = rows(tmp_path / "branches.csv")
    assert {row["sentence"] for row in found} == {str(i) for i in range(40)}
    assert {row["gate"] for row in found} == {"0.8"}
    means = {row["what"]: float(row["value"]) for row in rows(tmp_path / "branches_summary.csv")}
    assert means["tokens"] == len(found)
    decides = sum(row["decides"] == "1" for row in found) / len(found)
    assert means["surface_decides"] == pytest.approx(decides, abs=1e-4)


@pytest.mark.slow
def test_align(trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    argv = ["analyse", "align", *map(str, trained), "-o", str(tmp_path)]
    assert main([*argv, "--sentence", "3"]) == 0
    for name in ("surface", "decoder"):
        found = rows(tmp_path / f"align_{name}.csv")
        target = {row["target_position"] for row in found}
        assert sum(float(row["weight"]) for row in found) == pytest.approx(len(target), abs=1e-3)
        assert found[-1]["source"] == found[-1]["target"] == "</s>"
        assert (tmp_path / f"align_{name}.png").exists()
    capsys.readouterr()
    assert main([*argv, "--sentence", "40"]) == 2
    assert "--sentence 40: give 0 to 39, the sentences of the test set" in capsys.readouterr().err


def test_all_runs_every_analysis_that_applies(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["analyse", "all", *map(str, trained), "-o", str(tmp_path), "--beam", "1"]) == 0
    page = (tmp_path / "report.html").read_text(encoding="utf-8")
    sections = re.findall('<section id="(.*?)">', page)
    assert sections == [
        *("layers", "ablation", "singular_values", "pca", "neighbours"),
        *("branches_summary", "branches", "align_surface", "align_decoder"),
    ]
    assert page.count("<img ") == 6
    titles = {
        "layers": "weights of layers",
        "ablation": "BLEU, % change",
        "singular_values": "singular values of the embeddings",
        "pca": "the most frequent words",
        "align_surface": "surface attention",
        "align_decoder": "decoder attention",
    }
    for name, title in titles.items():
        assert f"<!-- {title} -->" in (tmp_path / f"{name}.svg").read_text(encoding="utf-8")


@pytest.mark.parametrize(
    ("argv", "text"),
    [
        (("layer", "x", "y", "-o", "z"), "invalid choice: 'layer'"),
        (("layers", "x", "y"), "the following arguments are required: -o/--output"),
        (("layers", "nowhere.pt", "y", "-o", "z"), "Model file not found: nowhere.pt"),
        (("ablate", "x", "y", "-o", "z", "--beam", "0"), "--beam 0: give 1 or more"),
    ],
    ids=str,
)
def test_mistakes_are_one_line(
    argv: tuple[str, ...],
    text: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(["analyse", *argv]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert text in line
    assert not [*tmp_path.iterdir()]


@pytest.mark.slow
def test_a_transformer_of_fairseq_is_analysed(
    trained: tuple[Path, Path], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    _, data = trained
    training = ("-a", "transformer", *SIZES, *OPTIMISER, "--optimizer", "adam", "--max-update", 1)
    argv = ("train", data, *training, "--disable-validation", "--no-epoch-checkpoints")
    assert main([*map(str, (*argv, "--save-dir", tmp_path))]) == 0
    capsys.readouterr()
    checkpoint = tmp_path / "checkpoint_last.pt"
    assert main(["analyse", "all", *map(str, (checkpoint, data)), "--cpu", "-o", str(tmp_path / "out")]) == 0
    made = {path.name for path in (tmp_path / "out").iterdir()}
    assert {"singular_values.csv", "align_decoder.png", "report.html"} <= made
    said = capsys.readouterr().err
    assert "layers: the model has no --encoder-fusion" in said
    assert "branches: the model has no --surfacefusion" in said
