"""scripts/bench: experiments from raw text, each in its smallest size on the CPU."""

import csv
import json
import re
import shutil
from argparse import Namespace
from collections.abc import Callable
from pathlib import Path

import pytest

from surface_fusion import SurfaceFusionError
from surface_fusion.analysis.loaded import Loaded
from tests.helpers.tiny import SHARED, shaken
from tests.scripts.bench.conftest import script

pytestmark = pytest.mark.slow


def test_methods_from_raw_text(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "methods.csv"
    argv = ("methods", "--quick", "--cpu", "--method", "dwatt", "vanilla", "--seeds", 3, 3, "--jobs", 2)
    argv += ("--speed",)
    run(*argv, "--work", tmp_path / "work", "-o", out)
    rows = script("results").read_rows(out)
    assert {(r.contender, r.unit) for r in rows} == {
        *((method, unit) for method in ("vanilla", "dwatt") for unit in ("BLEU", "chrF", "parameters")),
        ("dwatt", "p"),
        *((name, "tok/s") for name in ("fairseq", "vanilla", "dwatt")),
    }
    # A seed given twice counts once, and vanilla comes first, since the others are compared to it.
    assert sum(r.unit == "BLEU" for r in rows) == 2 * 2
    assert [(r.contender, r.n) for r in rows if r.unit == "p"] == [("dwatt", 1)] * 2
    sizes = {r.contender: r.value for r in rows if r.unit == "parameters"}
    dim, inner, d_pos = 16, 8, 24
    dwatt = 2 * (2 * dim * inner + 2 * inner) + 2 * dim + (d_pos + 1) * dim  # one encoder layer
    assert sizes["dwatt"] - sizes["vanilla"] == dwatt
    assert "nrefs:1|case:mixed" in capsys.readouterr().out
    kept = tmp_path / "work" / "en-ro" / "dwatt-3" / "outcome.json"
    before = kept.stat().st_mtime_ns
    run(*argv, "--work", tmp_path / "work", "-o", out)
    assert kept.stat().st_mtime_ns == before
    outcome = json.loads(kept.read_text(encoding="utf-8"))  # as if interrupted before the second translation
    lost = outcome["translations"].pop("newstest2016")
    kept.write_text(json.dumps(outcome), encoding="utf-8")
    checkpoint = kept.with_name("checkpoint_last.pt")
    before = checkpoint.stat().st_mtime_ns
    run(*argv, "--work", tmp_path / "work")
    assert json.loads(kept.read_text(encoding="utf-8"))["translations"]["newstest2016"] == lost
    assert checkpoint.stat().st_mtime_ns == before
    assert len(script("results").read_rows(out)) == 2 * len(rows)


def test_outcomes_of_another_machine_are_scored(run: Callable[..., None], tmp_path: Path) -> None:
    out = tmp_path / "methods.csv"
    argv = ("methods", "--quick", "--cpu", "--method", "vanilla", "--seeds", 3, "--work", tmp_path, "-o", out)
    run(*argv)
    kept = tmp_path / "en-ro" / "vanilla-3" / "outcome.json"
    outcome = json.loads(kept.read_text(encoding="utf-8"))
    outcome["asked"]["dtype"] = "fp16"
    outcome["machine"] = {"hardware": "a GPU", "torch": "2.99"}
    kept.write_text(json.dumps(outcome), encoding="utf-8")
    (kept.parent / "checkpoint_last.pt").unlink()
    run(*argv, "--score-only", "--dtype", "fp16")
    rows = script("results").read_rows(out)
    trained, scored = rows[: len(rows) // 2], rows[len(rows) // 2 :]
    assert [row.value for row in trained] == [row.value for row in scored]
    assert {(row.hardware, row.torch) for row in scored} == {("a GPU", "2.99")}
    with pytest.raises(SystemExit, match="vanilla-3 was trained with other flags; leave out --score-only"):
        run(*argv, "--score-only", "--lr", 1e-2)
    kept.write_text(kept.read_text(encoding="utf-8")[:100], encoding="utf-8")
    with pytest.raises(SystemExit, match=r"outcome.json is damaged \(.*\); remove it"):
        run(*argv)


def test_methods_goes_on_when_a_training_fails(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    methods = ("methods", "--quick", "--cpu", "--seeds", 3, "-o", tmp_path / "methods.csv")
    place = tmp_path / "work" / "en-ro" / "average-3"
    place.parent.mkdir(parents=True)
    place.write_text("no folder can be made here")
    with pytest.raises(SystemExit, match="average, seed 3"):
        run(*methods, "--work", tmp_path / "work", "--method", "average", "vanilla")
    assert "vanilla" in capsys.readouterr().out
    rows = script("results").read_rows(tmp_path / "methods.csv")
    assert {row.contender for row in rows} == {"vanilla"}


def test_a_folder_made_of_another_text_is_refused(run: Callable[..., None], tmp_path: Path) -> None:
    experiment = script("experiment")
    text, work = tmp_path / "text", tmp_path / "work"
    shutil.copytree(experiment.SAMPLE, text)
    data = experiment.prepare(text, work, ("en", "ro"), 300, experiment.QUICK_FILES)
    (work / "data-bin.new").mkdir()
    assert experiment.prepare(text, work, ("en", "ro"), 300, experiment.QUICK_FILES) == data
    with pytest.raises(SystemExit, match="another text or --vocab; give another --work"):
        experiment.prepare(text, work, ("en", "ro"), 301, experiment.QUICK_FILES)
    with open(text / "test.ro", "a", encoding="utf-8") as file:
        file.write("Încă un rând.\n")
    with pytest.raises(SystemExit, match="another text or --vocab; give another --work"):
        experiment.prepare(text, work, ("en", "ro"), 300, experiment.QUICK_FILES)


def test_one_run_at_a_time_works_in_a_folder(run: Callable[..., None], tmp_path: Path) -> None:
    experiment = script("experiment")
    with (
        experiment.work_folder(tmp_path, ("en", "ro")) as folder,
        pytest.raises(SystemExit, match=f"another run uses {re.escape(str(folder))}"),
    ):
        run("tune", "--quick", "--cpu", "--work", tmp_path)
    with experiment.work_folder(tmp_path, ("en", "ro")) as again:
        assert again == folder


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (("methods", "nowhere", "--work", "w"), "core.train.en"),
        (("methods", "--quick", "--cpu", "--vocab", 100000, "--seeds", 1), "--vocab 100000: .*[Vv]ocabulary"),
        (("tune", "--quick", "--dropout", 1.5), r"--dropout: 1.5: give a number in \[0, 1\)"),
        (("tune", "--quick", "--lr", 0), "--lr: 0: give a number above 0"),
        (("methods", "--quick", "--cpu", "--work", "/dev/null"), "--work /dev/null: Not a directory"),
        (("tune", "--quick", "--jobs", 0), "--jobs: 0: give a whole number of at least 1"),
        (("tune", "--quick", "--updates", "-1"), "--updates: -1: give a whole number of at least 1"),
        (("methods", "--quick", "--dtype", "fp32", "bf16"), "give TEXT and --work DIR, or --quick"),
        (("methods", "--quick", "--contender", "fast"), "unrecognized arguments: --contender"),
        (("scaling", "--quick", "--cpu", "--vocab", 3), "--vocab 3: 4 entries are special"),
        (("train", "nowhere", "--cpu"), "nowhere has no dict"),
        (("paper_figures", "nowhere", "nowhere.pt", "-o", "figures"), "nowhere.pt"),
    ],
)
def test_a_users_mistake_is_one_line(
    run: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    flags: tuple[object, ...],
    said: str,
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        run(*flags)
    message = str(end.value) if end.value.code != 2 else capsys.readouterr().err
    assert re.search(said, message.splitlines()[-1])


def test_tune_finds_the_best_learning_rate(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "tune.csv"
    run("tune", "--quick", "--cpu", "--dropout", 0, "--lr", 1e-3, 1e-2, 1e-3, "--jobs", 2, "-o", out)
    rows = script("results").read_rows(out)
    assert sorted(row.setting.split(";")[4] for row in rows) == ["lr=0.001", "lr=0.01"]
    assert {(row.unit, row.setting[-17:]) for row in rows} == {("BLEU", "test=valid;seed=1")}
    assert "best: Recipe(" in capsys.readouterr().out


def test_the_papers_figures_from_models_of_the_table(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    argv = ("methods", "--quick", "--cpu", "--method", "fine-grained", "--seeds", 1, 2, "--jobs", 2)
    run(*argv, "--work", tmp_path, "-o", tmp_path / "methods.csv")
    data = tmp_path / "en-ro" / "data-bin"
    models = [tmp_path / "en-ro" / f"fine-grained-{seed}" / "checkpoint_last.pt" for seed in (1, 2)]
    capsys.readouterr()
    run("paper_figures", data, *models, "-o", tmp_path / "figures", "--split", "valid", "--cpu")
    said = capsys.readouterr().out
    made = sorted(path.name for path in (tmp_path / "figures").iterdir())
    assert made == [f"figure{n}.{kind}" for n in (1, 2) for kind in ("csv", "png", "svg")]
    rows = list(csv.DictReader((tmp_path / "figures" / "figure1.csv").open(encoding="utf-8")))
    assert [(row["encoder_layer"], row["decoder_layer"], row["paper"]) for row in rows] == [
        ("Emb", "1", "0.13"),
        ("1", "1", "0.14"),
    ]
    assert sum(float(row["mean"]) for row in rows) == pytest.approx(1, abs=1e-3)
    assert f"{float(rows[0]['mean']):.3f} ±" in said and "the paper's claim" in said
    assert "BLEU loses most without layer" in said


def test_the_papers_figures_need_the_papers_model(monkeypatch: pytest.MonkeyPatch) -> None:
    figures = script("paper_figures")
    args = Namespace(data="data", split="test", cpu=True)
    fusion = ("--encoder-fusion", "fine-grained")
    for flags in ((), ("--encoder-fusion", "average"), fusion):
        monkeypatch.setattr(
            figures, "load", lambda *_, flags=flags: Loaded(shaken(SHARED, *flags), None, "test")
        )
        with pytest.raises(
            SurfaceFusionError, match=r"one\.pt was not trained with --encoder-fusion fine-grained"
        ):
            figures.load_fine_grained("one.pt", args)
    fused = Loaded(shaken(SHARED, *fusion, "--encoder-fusion-embedding"), None, "test")
    monkeypatch.setattr(figures, "load", lambda *_: fused)
    assert figures.load_fine_grained("one.pt", args) is fused
