"""The YAML configs, run by fairseq-hydra-train, give the same training as the flags of the same names."""

import re
import subprocess
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from fairseq import options
from omegaconf import OmegaConf

from surface_fusion.config.flags import SurfaceFusionConfig
from tests.conftest import RunFairseq
from tests.helpers import warm_processes
from tests.helpers.paths import ROOT
from tests.helpers.published_commands import FAST, TRAIN
from tests.helpers.published_commands import flags as published_flags

CLONE = ROOT
CONFIGS = ("demo", "wmt16_enro")
UPDATES = 3

Config = dict[str, dict[str, Any]]

# What makes any of the trainings one of seconds on a CPU.
SHORT = {
    "common.cpu": True,
    "common.fp16": False,
    "common.log_format": "simple",
    "common.log_interval": 1,
    "dataset.max_tokens": 300,
    "dataset.num_workers": 0,
    "optimization.max_update": UPDATES,
    "model.encoder_layers": 1,
    "model.decoder_layers": 2,
}


def read(name: str) -> Config:
    config = yaml.safe_load((CLONE / f"configs/{name}.yaml").read_text(encoding="utf-8"))
    return {group: fields for group, fields in config.items() if group not in ("defaults", "hydra")}


def changed(config: Config, overrides: Mapping[str, Any]) -> Config:
    config = {group: dict(fields) for group, fields in config.items()}
    for name, value in overrides.items():
        group, _, field = name.partition(".")
        config.setdefault(group, {})[field] = value
    return config


def as_flags(config: Config) -> list[str]:
    """The flags of fairseq-train that say the same."""
    config = OmegaConf.to_container(OmegaConf.create(config), resolve=True)
    names = {"model": "--arch", "lr_scheduler": "--lr-scheduler"}
    flags = [config["task"]["data"]]
    for group, fields in config.items():
        for field, value in fields.items():
            if field == "_name":
                flags += [names.get(group, f"--{group}"), value]
            elif (group, field) == ("task", "data") or value is None or value is False:
                continue
            elif value is True:
                flags += ["--" + field.replace("_", "-")]
            else:
                text = ",".join(map(str, value)) if isinstance(value, list) else str(value)
                flags += ["--" + field.replace("_", "-"), text]
    return flags


@dataclass
class Training:
    """One short training."""

    folder: Path
    log: str

    @property
    def state(self) -> dict[str, Any]:
        return torch.load(self.folder / "checkpoints/checkpoint_last.pt", weights_only=False)

    @property
    def losses(self) -> list[str]:
        return re.findall(r"loss=([\d.]+),.*num_updates=\d+", self.log)


def train(folder: Path, command: list[str]) -> Training:
    folder.mkdir()
    entry_point, *argv = command
    done = warm_processes.run(entry_point, *argv, cwd=folder)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    return Training(folder, done.stdout + done.stderr)


@pytest.fixture(scope="module")
def data(run_fairseq: RunFairseq, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("data") / "data-bin"
    text = CLONE / "tests/data/enro"
    prefixes = [f"--{split}pref={text / split}" for split in ("train", "valid")]
    run_fairseq("preprocess", "-s", "en", "-t", "ro", "--joined-dictionary", *prefixes, "--destdir", folder)
    return folder


@pytest.fixture(scope="module", params=CONFIGS)
def trainings(
    request: pytest.FixtureRequest, data: Path, user_dir: Path, tmp_path_factory: pytest.TempPathFactory
) -> tuple[Training, Training]:
    """The same training from the YAML file and from flags."""
    place = {"task.data": str(data), "common.user_dir": str(user_dir), "checkpoint.save_dir": "checkpoints"}
    overrides = {**SHORT, **place}
    folder = tmp_path_factory.mktemp(request.param)
    from_yaml = [
        *("fairseq_cli.hydra_train:cli_main", "--config-name", request.param),
        *("--config-dir", str(CLONE / "configs")),
        *(f"{name}={value}" for name, value in overrides.items()),
    ]
    from_flags = ["fairseq_cli.train:cli_main", *as_flags(changed(read(request.param), overrides))]
    with ThreadPoolExecutor() as pool:
        yaml_run = pool.submit(train, folder / "yaml", from_yaml)
        flags_run = pool.submit(train, folder / "flags", from_flags)
        return yaml_run.result(), flags_run.result()


@pytest.mark.slow
def test_same_losses_and_parameters(trainings: tuple[Training, Training]) -> None:
    from_yaml, from_flags = trainings
    assert len(from_yaml.losses) == UPDATES
    assert from_yaml.losses == from_flags.losses
    ours, theirs = from_yaml.state, from_flags.state
    assert ours["model"].keys() == theirs["model"].keys()
    for name, value in ours["model"].items():
        assert torch.equal(value, theirs["model"][name]), name
    for key in ("criterion_name", "optimizer_name", "lr_scheduler_state"):
        assert ours["optimizer_history"][-1][key] == theirs["optimizer_history"][-1][key]


@pytest.mark.slow
def test_same_configuration(trainings: tuple[Training, Training]) -> None:
    from_yaml, from_flags = (run.state["cfg"] for run in trainings)
    model = SurfaceFusionConfig.from_namespace(OmegaConf.create(from_yaml.pop("model")))
    published = SurfaceFusionConfig.from_namespace(from_flags.pop("model"))
    for config in (model, published):
        for part in (config, config.encoder, config.decoder, config.quant_noise):
            part._name = None  # fairseq copies the architecture's name into some of them
    assert model == published
    del from_yaml["job_logging_cfg"]  # hydra's
    assert from_flags.pop("scoring")["_name"] == "bleu"  # a default that the command line fills in
    assert from_yaml.pop("scoring") is None
    assert from_yaml == from_flags


def parsed(flags: list[str]) -> dict[str, Any]:
    """What fairseq-train reads from *flags*."""
    args = vars(options.parse_args_and_arch(options.get_training_parser(), flags))
    return {name: value for name, value in args.items() if name != "user_dir"}


def test_wmt16_enro_is_the_published_command(data: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)  # --fp16 is refused without a GPU
    config = changed(read("wmt16_enro"), {"task.data": str(data), "checkpoint.save_dir": "checkpoints"})
    published = [FAST.get(flag, flag) for flag in published_flags(TRAIN, Path("checkpoints"))]
    assert parsed(as_flags(config)) == parsed([str(data), "-s", "en", "-t", "ro", *published])


def test_demo_is_the_command_of_the_demo_script(data: Path) -> None:
    script = (CLONE / "scripts/demo.sh").read_text(encoding="utf-8")
    run = str(data.parent)
    # The script's first values are those of the full demo, the next those of --quick.
    numbers = [re.search(rf"^{name}=\d+$", script, re.M)[0] for name in ("updates", "warmup", "interval")]
    command = re.search(r"^ *surface-fusion train (.*?)\|", script, re.M | re.S)[1]
    quoted = "\n".join([f"run={run!r}", *numbers, f"printf '%s\\n' {command}"])
    flags = subprocess.run(["bash", "-c", quoted], capture_output=True, text=True, check=True).stdout
    place = {"task.data": str(data), "checkpoint.save_dir": f"{run}/checkpoints"}
    assert parsed(as_flags(changed(read("demo"), place))) == parsed(flags.splitlines())


@pytest.mark.slow
def test_a_training_writes_only_into_its_checkpoint_folder(trainings: tuple[Training, Training]) -> None:
    from_yaml, _ = trainings
    assert [path.name for path in from_yaml.folder.iterdir()] == ["checkpoints"]
