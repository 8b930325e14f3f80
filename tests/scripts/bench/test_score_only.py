"""scripts/bench: ``--score-only`` makes nothing, and says what does not fit."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

import pytest

from tests.scripts.bench.conftest import script

ARGV = ("methods", "--quick", "--cpu", "--score-only", "--method", "vanilla", "average")
MACHINE = {"hardware": "a GPU", "torch": "2.99"}
Leave = Callable[..., Path]


@pytest.fixture
def leave(tmp_path: Path) -> Leave:
    """``leave("vanilla", 3, MACHINE)``: the outcome of a training in fp16 by ``methods.py --quick``."""
    experiment, methods = script("experiment"), script("methods")
    folder = tmp_path / "work" / "en-ro"
    recipe = experiment.Recipe("en", "ro", "tiny", "pre", 0.3, 1e-3, 3, 800, "fp16", vocab=300)
    texts = {
        f"{split}.{language}": experiment.SAMPLE / f"{name}.{language}"
        for split, name in experiment.QUICK_FILES.items()
        for language in ("en", "ro")
    }
    digests = {name: hashlib.sha256(path.read_bytes()).hexdigest() for name, path in texts.items()}
    source = {"vocab": 300, "sha256": digests}
    lines = texts["test.ro"].read_text(encoding="utf-8").splitlines()

    def leave(method: str, seed: int, machine: object) -> Path:
        model = [*methods.METHODS[method], *methods.FAST]
        asked = {"model": model, "seed": seed, "data": source, **asdict(recipe)}
        outcome = {"asked": asked, "parameters": 7, "translations": dict.fromkeys(methods.TEST_SETS, lines)}
        outcome |= {} if machine is None else {"machine": machine}
        kept = folder / f"{method}-{seed}" / "outcome.json"
        kept.parent.mkdir(parents=True)
        kept.write_text(json.dumps(outcome), encoding="utf-8")
        (folder / "data-bin").mkdir(exist_ok=True)
        (folder / "data-bin" / "source.json").write_text(json.dumps(source), encoding="utf-8")
        return kept

    return leave


def contents(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*"))


def test_rows_name_the_machines_that_trained(run: Callable[..., None], tmp_path: Path, leave: Leave) -> None:
    leave("vanilla", 1, MACHINE)
    leave("vanilla", 2, MACHINE)
    leave("average", 1, {**MACHINE, "hardware": "another"})
    leave("average", 2, None)
    before, out = contents(tmp_path), tmp_path / "methods.csv"
    run(*ARGV, "--seeds", 1, 2, "--dtype", "fp16", "--work", tmp_path / "work", "-o", out)
    assert [path for path in contents(tmp_path) if path != out] == before
    rows = script("results").read_rows(out)
    found = {
        (r.contender, r.unit, r.setting[-6:], r.hardware, r.torch) for r in rows if r.unit != "parameters"
    }
    assert {name for name in found if name[1] == "BLEU"} == {
        *(("vanilla", "BLEU", f"seed={seed}", "a GPU", "2.99") for seed in (1, 2)),
        ("average", "BLEU", "seed=1", "another", "2.99"),
        ("average", "BLEU", "seed=2", "unknown", "unknown"),
    }
    assert {name[3:] for name in found if name[1] == "p"} == {
        ("a GPU + another + unknown", "2.99 + unknown")
    }, "p is of all of them"


def test_missing_outcomes_are_named_and_nothing_is_written(
    run: Callable[..., None], tmp_path: Path, leave: Leave, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--seeds", 1, "--dtype", "fp16", "-o", tmp_path / "methods.csv")
    with pytest.raises(SystemExit):
        run(*ARGV, *flags)
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .endswith("--score-only needs --work DIR, the folder of the translations")
    )
    with pytest.raises(SystemExit, match=r"^--work \S*work: \S*en-ro has no data-bin of these scripts; give"):
        run(*ARGV, *flags, "--work", tmp_path / "work")
    assert contents(tmp_path) == []
    leave("vanilla", 1, MACHINE)
    before = contents(tmp_path)
    for script_and_flags, names in (
        ((*ARGV, *flags), "average-1"),
        (
            ("tune", "--quick", "--score-only", "--dropout", 0, "-o", tmp_path / "t.csv"),
            "tune-tiny-pre-0.0-0.001",
        ),
    ):
        with pytest.raises(
            SystemExit, match=f"^\\S*en-ro has no outcome.json of {names}; leave out --score-only"
        ):
            run(*script_and_flags, "--work", tmp_path / "work")
    assert contents(tmp_path) == before


def test_what_differs_is_named_with_both_values(
    run: Callable[..., None], tmp_path: Path, leave: Leave
) -> None:
    kept = leave("vanilla", 1, MACHINE)
    argv = ("methods", "--quick", "--cpu", "--score-only", "--method", "vanilla", "--seeds", 1)
    with pytest.raises(SystemExit, match=r"was trained with other flags.*: --dtype fp16 \(here fp32\)$"):
        run(*argv, "--work", tmp_path / "work")
    with pytest.raises(SystemExit, match=r": --max-tokens 800 \(here 9\)$"):
        run(*argv, "--dtype", "fp16", "--max-tokens", 9, "--work", tmp_path / "work")
    outcome = json.loads(kept.read_text(encoding="utf-8"))
    del outcome["translations"]["core"]
    kept.write_text(json.dumps(outcome), encoding="utf-8")
    with pytest.raises(SystemExit, match=r"outcome\.json lacks translations of core; leave out --score-only"):
        run(*argv, "--dtype", "fp16", "--work", tmp_path / "work")


@pytest.mark.parametrize(
    "machine", ["a GPU", 3, {"hardware": "a GPU"}, {"hardware": ["a GPU"], "torch": "2.99"}]
)
def test_a_malformed_machine_is_one_line(
    run: Callable[..., None], tmp_path: Path, leave: Leave, machine: object
) -> None:
    leave("vanilla", 1, machine)
    argv = ("methods", "--quick", "--cpu", "--score-only", "--method", "vanilla", "--seeds", 1)
    with pytest.raises(
        SystemExit, match=r'outcome\.json: "machine" is .*; give it "hardware" and "torch"'
    ) as end:
        run(*argv, "--dtype", "fp16", "--work", tmp_path / "work")
    assert len(str(end.value).splitlines()) == 1


def test_quick_scores_one_seed(
    run: Callable[..., None], tmp_path: Path, leave: Leave, capsys: pytest.CaptureFixture[str]
) -> None:
    leave("vanilla", 1, MACHINE)
    out = tmp_path / "methods.csv"
    argv = ("methods", "--quick", "--cpu", "--score-only", "--method", "vanilla", "--dtype", "fp16")
    run(*argv, "--work", tmp_path / "work", "-o", out)
    assert {r.setting[-6:] for r in script("results").read_rows(out) if r.unit == "BLEU"} == {"seed=1"}
    with pytest.raises(SystemExit):
        run("methods", "--help")
    assert "one seed" in capsys.readouterr().out


@pytest.mark.parametrize("inside", ['{"asked": null}', '{"asked": {}, "translations": "text"}'])
def test_an_outcome_that_holds_something_else_is_damaged(
    run: Callable[..., None], tmp_path: Path, leave: Leave, inside: str
) -> None:
    leave("vanilla", 1, MACHINE).write_text(inside, encoding="utf-8")
    with pytest.raises(SystemExit, match=r"outcome.json is damaged \(its '(asked|translations)' is "):
        run(*ARGV[:-1], "--seeds", 1, "--dtype", "fp16", "--work", tmp_path / "work")
