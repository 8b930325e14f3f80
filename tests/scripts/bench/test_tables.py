"""scripts/bench: its arithmetic and its table, and each script once in its smallest size on the CPU."""

from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tests.scripts.bench.conftest import script

COLUMNS = "run,table,contender,setting,value,unit,n,hardware,torch,date"


def row(**changes: object) -> dict[str, object]:
    cells = dict(run="r1", table="train", contender="fast", setting="max_tokens=16384;phase=cold", value=2.5)
    return {
        **cells,
        "unit": "tok/s",
        "n": 5,
        "hardware": "a, b",
        "torch": "2.11",
        "date": "2026-01-01",
        **changes,
    }


def test_rows_are_appended_and_none_is_lost(tmp_path: Path) -> None:
    results = script("results")
    table = tmp_path / "deep" / "train.csv"
    rows = [results.Row(**row(value=float(i), n=i)) for i in range(3)]
    results.append_rows(table, rows[:1])
    results.append_rows(table, rows[1:])
    assert results.read_rows(table) == rows
    assert table.read_text().splitlines()[0] == COLUMNS
    assert [path.name for path in table.parent.iterdir()] == ["train.csv"]


def test_nothing_is_started_after_a_failure() -> None:
    begun = []

    def work(item: int, device: int | None) -> None:
        begun.append(item)
        raise SystemExit(f"{item} failed")

    with pytest.raises(SystemExit, match="0 failed"):
        list(script("contenders").on_gpus(work, range(100), at_once=1))
    assert begun == [0]


def test_a_child_gets_one_of_the_gpus_that_we_see(monkeypatch: pytest.MonkeyPatch) -> None:
    environment = script("contenders").child_environment
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert environment(1)["CUDA_VISIBLE_DEVICES"] == "1"
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "2,5")
    assert environment(1)["CUDA_VISIBLE_DEVICES"] == "5"
    assert environment()["CUDA_VISIBLE_DEVICES"] == "2,5"
    with pytest.raises(SystemExit, match=r"CUDA_VISIBLE_DEVICES=2,5 has no GPU number 2 \(from 0\); name"):
        environment(2)


def test_a_row_names_the_gpu_of_its_training(monkeypatch: pytest.MonkeyPatch) -> None:
    names = {None: "first", 1: "second"}
    monkeypatch.setattr(torch.cuda, "get_device_name", names.get)
    machine = script("results").machine
    assert machine(False) == {"hardware": "first", "torch": torch.__version__}
    assert machine(False, 1)["hardware"] == "second"
    assert machine(True)["hardware"].endswith("cores")


def test_each_batch_size_has_its_own_batches() -> None:
    """fairseq handed out the batches that it had made first, whatever the size."""
    from fairseq.data import Dictionary, LanguagePairDataset
    from fairseq.tasks.translation import TranslationConfig, TranslationTask
    from omegaconf import OmegaConf

    words = Dictionary()
    task = TranslationTask(TranslationConfig(source_lang="en", target_lang="ro"), words, words)
    sentences = [torch.tensor([words.eos()])] * 24
    task.datasets["test"] = LanguagePairDataset(sentences, [1] * 24, words)
    cfg = OmegaConf.create({"dataset": {"required_batch_size_multiple": 8}})
    collated = script("timed_generation").collated
    sizes = [[len(batch["id"]) for batch in collated(task, cfg, [], size, None)] for size in (1, 8)]
    assert sizes == [[1] * 24, [8] * 3]


def test_a_table_of_another_kind_is_left_alone(tmp_path: Path) -> None:
    results = script("results")
    table = tmp_path / "other.csv"
    table.write_text("a,b\n1,2\n")
    with pytest.raises(SystemExit, match="columns"):
        results.append_rows(table, [results.Row(**row())])
    with pytest.raises(SystemExit, match="columns"):
        results.Run("train", table, cpu=True)
    assert table.read_text() == "a,b\n1,2\n"


def test_contenders_are_compared_with_fairseq_at_the_same_setting() -> None:
    results = script("results")
    rows = [results.Row(**row(contender=c, value=v)) for c, v in (("fast", 30.0), ("fairseq", 10.0))]
    rows.append(results.Row(**row(contender="fast", value=7.0, setting="phase=steady")))
    text = "\n".join(results.comparison(rows))
    assert text.index("fairseq") < text.index("fast")
    assert "30.00   3.00 x" in text and "10.00   1.00 x" in text
    assert "7.00   1.00 x" in text, "alone it is its own measure"


RECORD = {
    "seconds": [2.0, 3.0, 4.0, 9.0, 10.0, 11.0, 12.0, 14.0],
    "tokens": [10, 10, 10, 10, 10, 10, 10, 10],
    "pauses": [[3, 4.0]],
    "steady_from": 2,
    "peak_gib": 1.0,
}


def test_the_cold_rate_counts_everything_since_the_first_epoch() -> None:
    train = script("train")
    assert train.cold_rate([RECORD], 4) == (40 / 9, 4)
    assert train.cold_rate([RECORD], 500) == (80 / 14, 8)


def test_steady_are_whole_windows_with_or_without_the_pauses_between_epochs() -> None:
    train = script("train")
    assert train.steady_rates([RECORD], 2, pauses=True) == [20 / 6, 20 / 2, 20 / 3]
    assert train.steady_rates([RECORD], 2, pauses=False) == [20 / 2, 20 / 2, 20 / 3]
    assert train.steady_rates([RECORD], 4, pauses=True) == [40 / 8], "an incomplete window does not count"
    assert train.steady_rates([{**RECORD, "steady_from": None}], 2, pauses=True) == []


def test_of_several_processes_all_tokens_count_in_the_time_of_the_slowest() -> None:
    train = script("train")
    slow = {**RECORD, "seconds": [2 * s for s in RECORD["seconds"]]}
    assert train.cold_rate([RECORD, slow], 4) == (80 / 18, 4)


def test_one_setting_is_varied_at_a_time() -> None:
    scaling = script("scaling")
    axes = {"max_tokens": [1, 2], "vocab": [8], "layers": [6, 9]}
    base = {"max_tokens": 2, "vocab": 8, "layers": 6}
    changes = [{"max_tokens": 1}, {}, {"layers": 9}]
    assert scaling.points(axes, base) == [{**base, **change} for change in changes]


def test_translations_that_differ_are_counted() -> None:
    one = SimpleNamespace(best=[[1, 2], [3]], scores=[-1.0, -2.0])
    other = SimpleNamespace(best=[[1, 2], [4]], scores=[-1.5, -2.25])
    assert script("decode").score_differences(one, other) == [0.25]


@pytest.mark.parametrize("contender", ["fairseq", "plain", "fast"])
def test_the_loss_of_each_contender_has_all_gradients(contender: str) -> None:
    loss = script("loss")
    problem = loss.make_problem(7, 4, 11, torch.float64, "cpu")
    for mode in loss.MODES:
        value, inputs = loss.LOSSES[contender](problem, mode)
        gradients = torch.autograd.grad(value, inputs)
        assert all(gradient.abs().max() > 0 for gradient in gradients)


def test_plain_and_fast_loss_are_one_number_in_hard_mode() -> None:
    loss = script("loss")
    problem = loss.make_problem(7, 4, 11, torch.float64, "cpu")
    plain, fast = (loss.LOSSES[name](problem, "hard")[0] for name in ("plain", "fast"))
    assert fast.item() == pytest.approx(plain.item(), rel=1e-9)


@pytest.mark.slow
def test_trainings_in_two_processes(run: Callable[..., None], tmp_path: Path) -> None:
    out = tmp_path / "train.csv"
    run("train", "--quick", "--cpu", "--contender", "fast", "--gpus", 2, "-o", out)
    rows = script("results").read_rows(out)
    assert [r.table for r in rows] == ["memory", "train", "train", "train"]
    assert all(r.contender == "fast" and "gpus=2" in r.setting and r.value > 0 for r in rows)
    assert all(";size=tiny;pairs=220" in r.setting for r in rows), "never to be taken for the README's"
    assert [r.n for r in rows] == [1, 1, 2, 2]
    assert len({r.run for r in rows}) == 1


@pytest.mark.slow
def test_curves_of_fast_and_plain_do_not_part_at_once(run: Callable[..., None], tmp_path: Path) -> None:
    out = tmp_path / "curves.csv"
    run("curves", "--quick", "--cpu", "-o", out)
    rows = script("results").read_rows(out)
    settings = [(r.contender, r.setting) for r in rows]
    assert settings == [
        ("plain", "size=tiny;order=reversed;updates=6"),
        ("fast", "size=tiny;order=straight;updates=6"),
        ("fast", "size=tiny;order=reversed;updates=6"),
    ]
    assert all(r.value < 1e-5 for r in rows)


@pytest.mark.slow
def test_bleu_of_each_path_and_seed(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "quality.csv"
    run("quality", "--quick", "--cpu", "--seeds", 7, 7, "--jobs", 2, "-o", out)
    rows = script("results").read_rows(out)  # as they were done
    assert sorted((r.contender, r.unit, r.n) for r in rows) == [("fast", "BLEU", 1), ("plain", "BLEU", 1)]
    assert all(r.setting.endswith("mode=hard;seed=7") for r in rows)
    assert "nrefs:1|case:mixed" in capsys.readouterr().out


@pytest.mark.slow
def test_all_tables_and_their_picture(
    run: Callable[..., None], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "all.csv"
    run("loss", "--quick", "--cpu", "-o", out)
    run("scaling", "--quick", "--cpu", "--vocab", "--layers", "-o", out)
    run("memory", "--quick", "--cpu", "--contender", "fairseq", "-o", out)
    run("decode", "--quick", "--cpu", "-o", out)
    assert "fp32, batch 128: 0 of 40 translations differ\n" in capsys.readouterr().out
    run("decode", "--quick", "--cpu", "--length", 5, "--contender", "fairseq", "-o", out)
    assert "fairseq: 5.0 tokens per translation" in capsys.readouterr().out
    with pytest.raises(SystemExit, match=r"--length 5000: the model translates at most 1023 tokens"):
        run("decode", "--quick", "--cpu", "--length", 5000, "--contender", "fairseq", "-o", out)
    rows = script("results").read_rows(out)
    assert {(r.table, r.contender) for r in rows} == {
        *(("loss", contender) for contender in ("fairseq", "plain", "fast", "floor")),
        *(("scaling", contender) for contender in ("fairseq", "fast")),
        ("memory", "fairseq"),
        *(("decode", contender) for contender in ("fairseq", "plain", "fast")),
    }
    assert all(r.value > 0 for r in rows)
    picture = tmp_path / "bench.png"
    run("plot", out, "-o", picture)
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.slow
def test_the_profile_accounts_for_an_update(run: Callable[..., None], tmp_path: Path) -> None:
    out = tmp_path / "profile.csv"
    run("step_profile", "--quick", "--cpu", "--contender", "fast", "-o", out)
    parts = {r.setting.partition("part=")[2]: r for r in script("results").read_rows(out)}
    assert {r.table for r in parts.values()} == {"profile"} and parts.pop("kernels").unit == "count"
    assert {"all", "matrix products", "optimizer", "outside of operators"} <= set(parts)
    assert all(r.unit == "ms" and r.n == 6 for r in parts.values())


def test_kernels_are_assigned_to_parts_by_name() -> None:
    part_of = script("step_profile").part_of
    assert part_of("nvjet_sm90_hsh_64x48_64x15_2x4_h_bz_bias_TNT") == "matrix products"
    assert part_of("_forward_kernel") == part_of("fmha_cutlassF_f32_aligned_64x64_rf_sm80") == "attention"
    assert part_of("_softmax_kernel") == part_of("cunn_SoftMaxForward") == "softmax and loss"
    assert part_of("_add_norm_backward_kernel") == "LayerNorm, residual, dropout"
    assert part_of("multi_tensor_apply_kernel") == "optimizer" and part_of("Memset (Device)") == "copies"
    assert part_of("something else") == "other"


def test_time_of_concurrent_kernels_counts_once() -> None:
    profile = script("step_profile")
    pieces = [profile.KernelRun("gemm", *when) for when in ((0.0, 1000.0), (500.0, 1000.0), (4000.0, 500.0))]
    assert profile.busy(pieces) == 2.0 and profile.milliseconds(pieces) == {"matrix products": 2.5}


@pytest.mark.parametrize(
    ("flags", "words"), [((), "DATA-BIN"), (("--quick", "--cpu", "--dtype", "fp16"), "needs a CUDA GPU")]
)
def test_invalid_measurements_are_refused(
    run: Callable[..., None], tmp_path: Path, flags: tuple[str, ...], words: str
) -> None:
    with pytest.raises(SystemExit, match=words):
        run("train", *flags, "-o", tmp_path / "train.csv")


def test_a_table_that_is_missing_is_one_line(run: Callable[..., None], tmp_path: Path) -> None:
    with pytest.raises(SystemExit, match=r"nothere\.csv is not a file; give a CSV"):
        run("plot", tmp_path / "nothere.csv", "-o", tmp_path / "x.png")


@pytest.mark.slow
def test_the_committed_tables_can_be_drawn(run: Callable[..., None], tmp_path: Path) -> None:
    run("plot", "-o", tmp_path / "all.svg")
    assert (tmp_path / "all.svg").read_text(encoding="utf-8").startswith("<?xml")


@pytest.mark.parametrize("name", ["timed_training", "timed_generation"])
def test_help_of_inner_scripts_names_the_script(
    run: Callable[..., None], capsys: pytest.CaptureFixture[str], name: str
) -> None:
    run(name, "--help")
    assert f"python {name}.py" in capsys.readouterr().out


def test_a_picture_names_all_hardware_that_is_drawn(tmp_path: Path) -> None:
    results = script("results")
    machines = (("r0", "old"), ("r1", "a, b"), ("r1", "c"), ("r1", "a, b"))
    rows = [results.Row(**row(run=run, hardware=hardware)) for run, hardware in machines]
    script("plot").draw(rows, tmp_path / "all.svg")
    drawn = (tmp_path / "all.svg").read_text(encoding="utf-8")
    assert "<!-- train, a, b + c, torch 2.11 -->" in drawn
