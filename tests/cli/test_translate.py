"""``surface-fusion translate``: raw lines in, plain lines out, one for one, whatever the lines are."""

import io
import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from surface_fusion.cli.main import main
from tests.helpers import warm_processes
from tests.helpers.model_folder import train_model_folder
from tests.helpers.small_training import TEXT


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return train_model_folder(tmp_path_factory.mktemp("model"))


def translated(
    folder: Path, text: str, monkeypatch: Any, capsys: Any, *flags: object
) -> tuple[list[str], str]:
    """The lines that came out, and what was said on stderr."""
    monkeypatch.setattr(sys, "stdin", io.StringIO(text))
    capsys.readouterr()
    assert main(["translate", str(folder), "--beam", "2", "--cpu", *map(str, flags)]) == 0
    out, err = capsys.readouterr()
    assert out.endswith("\n")
    return out.split("\n")[:-1], err


def process(folder: Path, text: bytes, *flags: str, **settings: Any) -> warm_processes.Ended:
    """What a process of its own made of *text*."""
    argv = ("translate", folder, "--beam", "1", "--cpu", *flags)
    done = warm_processes.run(warm_processes.SURFACE_FUSION, *argv, text=text, **settings)
    assert done.returncode == 0, done.stderr
    return done


def test_each_line_has_one_translation(folder: Path, monkeypatch: Any, capsys: Any, caplog: Any) -> None:
    lines = ["Good morning.", "", "  ", "word " * 100, "Tom is here.\u2028Where?", "Ünknown ☃ letters"]
    out, _ = translated(folder, "\n".join(lines), monkeypatch, capsys)
    assert len(out) == len(lines)
    assert [i for i, line in enumerate(out) if not line] == [1, 2, 3]
    assert "line 4 has" in caplog.text and "the model takes 60; its translation is left empty" in caplog.text
    assert "\u2581" not in "".join(out)


def test_a_relative_path_to_the_model_works_in_any_folder(
    folder: Path, monkeypatch: Any, capsys: Any
) -> None:
    (folder / "scripts").mkdir(exist_ok=True)
    monkeypatch.chdir(folder / "scripts")
    assert translated(Path(os.pardir), "Hi\n", monkeypatch, capsys) == translated(
        folder, "Hi\n", monkeypatch, capsys
    )


@pytest.mark.slow
def test_a_line_translates_the_same_alone_and_in_a_batch(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """More lines than are translated at once, of several lengths."""
    text = (TEXT / "train.en").read_text(encoding="utf-8").splitlines()[:70]
    together, _ = translated(folder, "\n".join(text) + "\n", monkeypatch, capsys)
    assert len(together) == len(text)
    for i in (0, 3, len(text) - 1):
        assert translated(folder, text[i], monkeypatch, capsys)[0] == [together[i]]


def test_a_line_that_is_not_utf_8_is_translated(folder: Path) -> None:
    done = process(folder, b"\xff\xfe bad\nGood morning.\n")
    assert done.stdout.count("\n") == 2 and "Traceback" not in done.stderr
    assert done.stderr.startswith("surface-fusion translate: line 1 is not UTF-8 text: invalid start byte at")


def test_a_line_that_is_too_long_is_named_on_stderr(folder: Path) -> None:
    """By its number in the whole input, which is translated in parts."""
    text = b"Tom is here.\n" * 64 + b"word " * 100
    assert "line 65 has" in process(folder, text).stderr


def test_only_a_line_feed_ends_a_line(folder: Path) -> None:
    lines = [f"Tom {c} is here." for c in "\r\v\f\x1c\x1d\x1e\x85\u2028\u2029"]
    text = "\ufeff" + "".join(line + "\r\n" for line in ["Tom is here.", *lines])
    found = process(folder, text.encode()).stdout.split("\n")
    assert len(found) == len(lines) + 2 and found[-1] == ""
    assert found[0] == found[1], "a carriage return is a space, a byte order mark nothing"


def test_lines_are_translated_when_their_input_pauses(folder: Path) -> None:
    """Then the process is interrupted while it waits, and says so."""
    (read, stdin), (stdout, write), (stderr, errors) = (os.pipe() for _ in range(3))
    argv = ("translate", folder, "--beam", "1", "--cpu")
    streams = {"stdin": read, "stdout": write, "stderr": errors}
    running = warm_processes.start(warm_processes.SURFACE_FUSION, *argv, **streams)
    for end in streams.values():
        os.close(end)
    late = threading.Timer(120, running.kill)  # then there is nothing to read
    late.start()
    with open(stdin, "w") as typed, open(stdout) as translations, open(stderr) as said:
        for text in ("Tom is here.\nGood morning.\n", "Where?\n"):
            typed.write(text)
            typed.flush()
            for _ in range(text.count("\n")):
                assert translations.readline().endswith("\n")
        assert running.pid is not None
        os.kill(running.pid, signal.SIGINT)
        assert warm_processes.wait(running, 30) == 130
        late.cancel()
        assert said.read().endswith("translate: interrupted\n")


@pytest.mark.parametrize("flags", [(), ("--explain",)])
@pytest.mark.slow
def test_the_batch_size_of_the_training_does_not_limit_lines(
    folder: Path, monkeypatch: Any, capsys: Any, flags: tuple[str, ...]
) -> None:
    """Of a model that was trained on batches of 12 tokens, one sentence each."""
    path = folder / "checkpoints" / "checkpoint_last.pt"
    state = torch.load(path)
    state["cfg"]["dataset"]["max_tokens"], state["cfg"]["dataset"]["batch_size"] = 12, 1
    torch.save(state, path.with_name("small_batches.pt"))
    text = "Good morning.\n" + "word " * 12 + "\nTom is here.\n"
    whole, _ = translated(folder, text, monkeypatch, capsys, "--checkpoint", path.name, *flags)
    found, err = translated(folder, text, monkeypatch, capsys, "--checkpoint", "small_batches.pt", *flags)
    assert found == whole and err == "" and len(found) >= 3 and found[1]


@pytest.mark.slow
def test_explain_prints_a_table_below_each_translation(
    folder: Path, tmp_path: Path, monkeypatch: Any, capsys: Any
) -> None:
    """Each translation as without, and below it a table; files where they were asked for."""
    text = "Good morning.\n\nTom is here."
    plain, _ = translated(folder, text, monkeypatch, capsys)
    out, _ = translated(folder, text, monkeypatch, capsys, "--explain", "-o", tmp_path)
    assert [line for line in out if not line.startswith("    ")] == plain
    heads = [line for line in out if line.startswith("    token")]
    named = ("target branch", "surface branch", "read by surface", "read by decoder")
    assert len(heads) == 2 and all(name in heads[0] for name in named)
    assert sum(line.startswith("    </s>") for line in out) == 2
    assert sum("the surface branch changed the most probable token" in line for line in out) == 2
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "3"]
    made = {path.name for path in (tmp_path / "3").iterdir()}
    assert {"branches.csv", "align_surface.png", "align_decoder.svg"} <= made


def test_the_translation_is_utf_8_in_any_locale(folder: Path) -> None:
    environment = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = process(folder, b"Tom is here.\n", "--explain", env=environment)
    assert "\u2581" in done.stdout  # in the table of tokens


def test_a_closed_output_is_named(folder: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Tom is here.\n"))
    monkeypatch.setattr(sys, "stdout", None)
    assert main(["translate", str(folder), "--cpu"]) == 2
    assert "standard output is closed" in capsys.readouterr().err


def test_out_needs_explain(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["translate", str(folder), "-o", "x"]) != 0
    assert "-o needs --explain" in capsys.readouterr().err
    file = folder / "file"
    file.touch()
    assert main(["translate", str(folder), "--explain", "-o", str(file)]) != 0
    assert f"-o {file} is a file; give a folder" in capsys.readouterr().err
