"""``surface-fusion train --config FILE`` trains as fairseq-hydra-train; log and errors are the verb's."""

import os
import subprocess
import sys

import pytest
import torch
import yaml

from tests.helpers.paths import ROOT

DEMO = ROOT / "configs/demo.yaml"
SHORT = {
    "common.cpu": "true",
    "model.encoder_layers": 1,
    "model.decoder_layers": 1,
    "optimization.max_update": 2,
    "dataset.disable_validation": "true",
}


@pytest.fixture
def overrides(data, user_dir):
    """Settings that make the demo's training short, and where its files are."""
    settings = {**SHORT, "task.data": data, "common.user_dir": user_dir, "checkpoint.save_dir": "save"}
    return [f"{name}={value}" for name, value in settings.items()]


@pytest.fixture
def changed(tmp_path):
    """``changed("task", data="x")``: the demo's file with this field in this section."""

    def write(section, **fields):
        config = yaml.safe_load(DEMO.read_text(encoding="utf-8"))
        config[section] = config[section] | fields
        (tmp_path / "changed.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")
        return tmp_path / "changed.yaml"

    return write


def test_training(command, data, overrides, tmp_path):
    before = (os.getcwd(), dict(os.environ), sys.argv)
    result = command("train", "--config", DEMO, *overrides)
    assert (result.status, result.err) == (0, "")
    assert result.out.count("configuration not shown; add --show-config to see it") == 1
    assert max(map(len, result.out.splitlines())) < 1000
    assert result.out.count("| INFO | fairseq_cli.train | begin") == 0
    assert all(len(line.split(" | ")) >= 3 for line in result.out.splitlines() if line.startswith("20"))
    assert (os.getcwd(), dict(os.environ), sys.argv) == before
    assert sorted(path.name for path in tmp_path.iterdir()) == ["save"]
    state = torch.load(tmp_path / "save/checkpoint_last.pt", weights_only=False)
    assert state["optimizer_history"][-1]["num_updates"] == 2
    assert state["cfg"]["model"]["sf_gate"] == 0.8
    again = command("train", "--config", DEMO, *overrides)
    assert again.status == 0 and "@ 2 updates" in again.out


def test_configuration_is_shown_on_request(command, overrides):
    result = command("train", "--config", DEMO, "--show-config", *overrides)
    assert result.status == 0 and "configuration not shown" not in result.out
    assert max(map(len, result.out.splitlines())) > 1000


@pytest.mark.slow
def test_nothing_but_the_log_is_printed(overrides, tmp_path):
    argv = [sys.executable, "-m", "surface_fusion", "train", "--config", DEMO, *overrides]
    done = subprocess.run(argv, capture_output=True, text=True, cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    "argv, line",
    [
        (("--config", "nowhere.yaml"), "--config nowhere.yaml is not a file; give a YAML file"),
        (("--config", "."), "--config . is not a file; give a YAML file"),
        (("--config", DEMO, "-m"), "-m cannot be used with --config: start one training at a time"),
        (("--config", DEMO, "--multirun"), "--multirun cannot be used with --config"),
        (("--config", DEMO, "--lr", "1"), "--lr cannot be used with --config: give settings as key=value"),
        (("--config", DEMO, "DATA"), "DATA is not a setting: with --config, give key=value"),
        (("--config", DEMO, "optimization.max_updat=1"), "optimization.max_updat: Key 'max_updat'"),
        (("--config", DEMO, "optimization.max_update=["), "no viable alternative at input '['"),
        (("--config", DEMO, "optimization.max_update=many"), "optimization.max_update: Value 'many'"),
        (("--config", DEMO, "model.sf_gat=1"), "model.sf_gat: Key 'sf_gat'"),
        (("--config", DEMO, "+model.sf_gat=1"), "model.sf_gat in the YAML config is not an option of this"),
        (("--config", DEMO, "model.sf_gate=2"), "--sf-gate 2"),
        (("--config", DEMO, "dataset.max_tokens=0"), "--max-tokens 0: give a number of at least 1"),
        (("--config", DEMO, "criterion.label_smoothing=1.5"), "--label-smoothing 1.5 is not a probability"),
        (("--config", DEMO, "task.data=missing"), "data folder missing does not exist"),
    ],
    ids=lambda value: " ".join(map(str, value[1:])) if isinstance(value, tuple) else "",
)
def test_errors(refused, overrides, argv, line):
    given = [override for override in overrides if override.split("=")[0] not in str(argv[2:])]
    assert refused("train", *argv[:2], *given, *argv[2:]).startswith(line)


@pytest.mark.parametrize(
    "section, fields, line",
    [
        ("dataset", {"max_token": 1}, "dataset.max_token: Key 'max_token'"),
        ("criterion", {"smoothing": 1}, "smoothing: Key 'smoothing' not in 'Fused"),
        ("optimization", {"max_update": "many"}, "optimization.max_update: Value 'many'"),
        (
            "task",
            {"_name": "translatoin"},
            "task._name: there is no task translatoin; did you mean translation?",
        ),
        (
            "model",
            {"_name": "transformer_surface_fuson"},
            "model._name: there is no model transformer_surface_fus",
        ),
        ("optimizer", {"_name": None}, "optimizer._name is missing; add it to the file"),
        ("optimizer", {"_name": "addam"}, "optimizer._name: there is no optimizer addam; did you mean adam?"),
    ],
    ids=str,
)
def test_errors_in_the_file(refused, overrides, changed, section, fields, line):
    given = [override for override in overrides if override.split(".")[0] != "optimization"]
    said = refused("train", "--config", changed(section, **fields), *given)
    assert said.startswith(line) and len(said) < 400


def test_the_name_of_the_file(refused, tmp_path):
    for name in ("demo.yml", "config.yaml"):
        (tmp_path / name).touch()
    assert refused("train", "--config", "demo.yml") == "--config demo.yml: its name must end in .yaml"
    assert "fairseq has a configuration of this name" in refused("train", "--config", "config.yaml")
