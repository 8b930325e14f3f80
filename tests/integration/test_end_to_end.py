"""Everything a user does with a translation model, on real text, from the command line, on the CPU."""

import json
import os
import re
import signal
import socket
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from surface_fusion import scoring
from surface_fusion.cli.main import main
from tests.helpers import warm_processes
from tests.helpers.small_training import OPTIMISER, PLAIN, PREPROCESS, TEXT, TRAIN
from tests.helpers.warm_processes import SURFACE_FUSION

pytestmark = pytest.mark.slow

SHORT = ("--num-workers", 0, "--max-len-b", 20)  # a model of two epochs rarely ends a sentence
EXACT = ("--dropout", 0, "--attention-dropout", 0)


def strings(*argv):
    return [*map(str, argv)]


def run(*argv):
    """A command of its own, its log."""
    done = warm_processes.run(SURFACE_FUSION, *argv, merge=True)
    assert done.returncode == 0, done.stdout[-3000:]
    return done.stdout


def updates(log):
    """What a training with ``--log-format json --log-interval 1`` logged of each update."""
    found = (re.search(r"\| train_inner \| (\{.*\})", line) for line in log.splitlines())
    return {int(entry["num_updates"]): entry for entry in (json.loads(m.group(1)) for m in found if m)}


def load(path):
    return torch.load(path, weights_only=False)


def parameters(path):
    return {name: value for name, value in load(path)["model"].items() if not name.endswith("_float_tensor")}


def assert_same_tensors(one, other):
    assert one.keys() == other.keys()
    for name, value in one.items():
        assert value.equal(other[name]), name


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    folder = tmp_path_factory.mktemp("data-bin")
    log = run("preprocess", *PREPROCESS, "--destdir", folder)
    assert "train.ro: 220 sents" in log and "test.ro: 40 sents" in log
    return folder


@pytest.fixture(scope="module")
def fused(data, tmp_path_factory):
    """A training of two epochs, resumed for a third: its folder and both logs."""
    folder = tmp_path_factory.mktemp("fused")
    argv = ("train", data, *TRAIN, "--save-dir", folder, "--log-format", "json", "--log-interval", 1)
    first = run(*argv, "--max-epoch", 2)
    second = run(*argv, "--max-epoch", 3)
    return folder, first, second


@pytest.fixture(scope="module")
def plain(data, tmp_path_factory):
    """A checkpoint of fairseq's own Transformer."""
    folder = tmp_path_factory.mktemp("plain")
    run("train", data, *PLAIN, *OPTIMISER, "--save-dir", folder, "--max-epoch", 2)
    return folder / "checkpoint_last.pt"


@pytest.fixture
def command(capsys):
    """A command in this process, what it printed."""

    def run_here(*argv):
        capsys.readouterr()
        assert main(strings(*argv)) == 0
        return capsys.readouterr().out

    return run_here


def test_a_training_reduces_the_loss_and_resumes(fused):
    folder, first, second = fused
    before, after = updates(first), updates(second)
    assert sorted(before) == list(range(1, len(before) + 1)) and len(before) % 2 == 0
    assert sorted(after) == list(range(len(before) + 1, 3 * len(before) // 2 + 1))
    assert "Loaded checkpoint" in second and "(epoch 3 @ " in second
    assert float(before[1]["loss"]) > 1 + float(after[max(after)]["loss"])
    assert load(folder / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == max(after)


def test_average_generate_score(fused, data, tmp_path, command):
    folder = fused[0]
    mean = tmp_path / "mean.pt"
    said = command("average", "--last", 3, folder, "-o", mean)
    assert said.startswith(f"{mean}: the mean of 3 checkpoints, {folder}/checkpoint1.pt, ")
    assert mean.stat().st_size < (folder / "checkpoint3.pt").stat().st_size / 2
    three = [parameters(folder / f"checkpoint{i}.pt") for i in (1, 2, 3)]
    for name, value in parameters(mean).items():
        expected = sum(one[name].double() for one in three) / 3
        torch.testing.assert_close(value, expected.to(value.dtype), rtol=0, atol=0)

    generated = command("generate", data, "--path", mean, "--cpu", "--beam", 4, "--max-tokens", 300, *SHORT)
    output = scoring.parse_generate_output(generated.split("\n"))
    assert output.ids == list(range(40)) and not output.skipped
    (tmp_path / "generated.txt").write_text(generated, encoding="utf-8")
    asked = ("score", "--generate-output", tmp_path / "generated.txt", "--ref", TEXT / "test.ro", "--json")
    facts = json.loads(command(*asked, "--lang", "ro"))
    assert facts["sentences"] == 40 and facts["skipped"] == []
    references = (TEXT / "test.ro").read_text(encoding="utf-8").splitlines()
    expected = scoring.score_text(output.text, references, romanian=True)
    expected += scoring.score_tokens(output.tokens, output.tokenised_references, romanian=True)
    assert [one["value"] for one in facts["scores"]] == [one.value for one in expected]


def test_interactive_gives_the_translations_of_generate(fused, data, command):
    path = fused[0] / "checkpoint_best.pt"
    argv = (data, "--path", path, "--cpu", "--beam", 3, *SHORT)
    generated = command("generate", *argv)
    typed = command("interactive", *argv, "--input", TEXT / "test.en")
    translations = [line.split("\t")[2] for line in typed.splitlines() if line.startswith("H-")]
    assert translations == scoring.parse_generate_output(generated.split("\n")).tokens


def test_validate_gives_the_loss_stored_by_the_training(fused, data, command):
    path = fused[0] / "checkpoint_last.pt"
    log = command("validate", data, "--path", path, "--cpu", "--num-workers", 0, "--max-tokens", 400)
    (loss,) = re.findall(r"valid on 'valid' subset \| loss ([\d.]+)", log)
    assert float(loss) == pytest.approx(load(path)["extra_state"]["val_loss"], abs=6e-4)


def test_ensemble_with_a_plain_transformer_averages_probabilities(fused, plain, data, command):
    def token_probabilities(path):
        printed = command("generate", data, "--path", path, "--cpu", "--num-workers", 0, "--score-reference")
        rows = [line.split("\t") for line in printed.splitlines() if line.startswith("P-")]
        assert len(rows) == 40
        return {name: 2 ** torch.tensor([*map(float, scores.split())]) for name, scores in rows}

    ours = fused[0] / "checkpoint_last.pt"
    one, other, both = map(token_probabilities, (ours, plain, f"{ours}:{plain}"))
    for name, probability in both.items():
        torch.testing.assert_close(probability, (one[name] + other[name]) / 2, rtol=2e-3, atol=1e-7)

    printed = command("generate", data, "--path", f"{ours}:{plain}", "--cpu", "--beam", 4, *SHORT)
    assert scoring.parse_generate_output(printed.split("\n")).ids == list(range(40))


def test_data_workers_do_not_change_the_training(fused, data, tmp_path):
    run("train", data, *TRAIN, "--save-dir", tmp_path, "--max-epoch", 2, "--num-workers", 2)
    assert_same_tensors(parameters(tmp_path / "checkpoint2.pt"), parameters(fused[0] / "checkpoint2.pt"))


@pytest.fixture(scope="module")
def uninterrupted(data, tmp_path_factory):
    """A training of two epochs that validates and saves every 4 updates: command line, folder, updates."""
    folder = tmp_path_factory.mktemp("uninterrupted")
    log_all = ("--log-format", "json", "--log-interval", 1)
    argv = ("train", data, *TRAIN, *log_all, "--save-interval-updates", 4)
    return argv, folder, updates(run(*argv, "--save-dir", folder, "--max-epoch", 2))


@pytest.mark.parametrize("killed_at, saved_at", [(6, 4), (7, 7), (11, 8)])
def test_a_killed_and_resumed_training_equals_the_uninterrupted_one_bit_for_bit(
    uninterrupted, tmp_path, killed_at, saved_at
):
    """Public reports fs 781, 5387 and 848: resuming changed the run, or repeated data.

    Killed in the first epoch of 7 updates, stopped between the two, killed in the second.
    """
    argv, folder, expected = uninterrupted
    assert len(expected) == 14
    argv = (*argv, "--save-dir", tmp_path)
    if killed_at == saved_at:
        run(*argv, "--max-epoch", 1)
    else:
        read, write = os.pipe()
        process = warm_processes.start(SURFACE_FUSION, *argv, "--max-epoch", 2, stdout=write)
        os.close(write)
        with open(read) as log:
            for line in log:
                if f'"num_updates": "{killed_at}"' in line:
                    process.kill()
                    break
            assert warm_processes.wait(process, 60) == -signal.SIGKILL
    assert load(tmp_path / "checkpoint_last.pt")["optimizer_history"][-1]["num_updates"] == saved_at

    resumed = updates(run(*argv, "--max-epoch", 2))
    assert sorted(resumed) == list(range(saved_at + 1, 15))
    for number, entry in resumed.items():
        for measure in ("loss", "gnorm", "wpb"):
            assert entry[measure] == expected[number][measure], f"{measure} of update {number}"
    last = [where / "checkpoint_last.pt" for where in (folder, tmp_path)]
    assert_same_tensors(*map(parameters, last))
    moments = [load(path)["last_optimizer_state"]["state"] for path in last]
    for index, state in moments[0].items():
        assert state["exp_avg"].equal(moments[1][index]["exp_avg"])
        assert state["exp_avg_sq"].equal(moments[1][index]["exp_avg_sq"])


def run_two_processes(*argv):
    """The same command as rank 0 and rank 1, over gloo; the log of each."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    together = (
        *("--distributed-world-size", 2, "--distributed-backend", "gloo", "--distributed-no-spawn"),
        *("--distributed-init-method", f"tcp://127.0.0.1:{port}", "--ddp-backend", "no_c10d"),
    )
    with ThreadPoolExecutor() as pool:
        ranks = pool.map(lambda rank: run(*argv, *together, "--distributed-rank", rank), (0, 1))
        return [*ranks]


def test_two_processes_train_and_resume_as_one_process_with_twice_the_batches(data, tmp_path):
    """Public report fs 4875, and gradients that agree between workers."""
    argv = ("train", data, *TRAIN, *EXACT, "--log-format", "json", "--log-interval", 1)
    alone = updates(run(*argv, "--save-dir", tmp_path / "alone", "--update-freq", 2, "--max-epoch", 2))
    first = run_two_processes(*argv, "--save-dir", tmp_path / "two", "--max-epoch", 1)[0]
    second = run_two_processes(*argv, "--save-dir", tmp_path / "two", "--max-epoch", 2)[0]
    assert "(epoch 2 @ " in second
    together = {**updates(first), **updates(second)}
    assert not updates(first).keys() & updates(second).keys()
    assert sorted(together) == sorted(alone)
    for number, entry in together.items():
        assert float(entry["loss"]) == pytest.approx(float(alone[number]["loss"]), abs=2e-3), (
            f"update {number}"
        )
    for name, value in parameters(tmp_path / "two" / "checkpoint_last.pt").items():
        torch.testing.assert_close(
            value, parameters(tmp_path / "alone" / "checkpoint_last.pt")[name], rtol=1e-3, atol=1e-4
        )
