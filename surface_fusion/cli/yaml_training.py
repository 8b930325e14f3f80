"""``surface-fusion train --config FILE``: train from a YAML file, by fairseq's ``fairseq-hydra-train``."""

import contextlib
import os
import sys
import warnings
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from fairseq import utils
from fairseq.models import ARCH_MODEL_REGISTRY, MODEL_REGISTRY
from fairseq.registry import REGISTRIES
from fairseq.tasks import TASK_REGISTRY
from omegaconf import DictConfig, OmegaConf

from surface_fusion.compat.patching import replaced
from surface_fusion.errors import SurfaceFusionError, unknown_setting


def train_from_yaml(file: str, overrides: Sequence[str], set_up: Callable[[], None]) -> None:
    """Train as ``fairseq-hydra-train --config-dir DIR --config-name NAME OVERRIDE ...`` does.

    Args:
        file: the path DIR/NAME.yaml.
        overrides: ``key=value`` settings, which take precedence over those of the file.
        set_up: sets up logging; called after hydra has done so.

    Raises:
        SurfaceFusionError: *file* or *overrides* cannot be used.
    """
    path = Path(file)
    _check(path, overrides)
    command = ["--config-dir", str(path.parent.absolute()), "--config-name", path.stem, *overrides]
    failures: list[Exception] = []
    with _hydra_raises_its_errors(), replaced(sys, "argv", [sys.argv[0], *command]):
        from fairseq_cli import hydra_train  # warns about hydra's next version

        fairseqs_main = hydra_train._hydra_main

        def main(cfg: Any) -> None:
            set_up()
            try:
                _check_names(cfg)
                fairseqs_main(cfg)
            except Exception as error:  # hydra would print a line of its own
                failures.append(error)

        with replaced(hydra_train, "_hydra_main", main):
            hydra_train.cli_main()
    if failures:
        raise failures[0]


def _check(path: Path, overrides: Sequence[str]) -> None:
    if not path.is_file():
        raise SurfaceFusionError(f"--config {path} is not a file; give a YAML file such as configs/demo.yaml")
    if path.suffix != ".yaml":
        raise SurfaceFusionError(f"--config {path}: its name must end in .yaml")
    if path.name == "config.yaml":
        raise SurfaceFusionError(
            f"--config {path}: fairseq has a configuration of this name; rename the file"
        )
    for override in overrides:
        if override in ("-m", "--multirun"):
            raise SurfaceFusionError(f"{override} cannot be used with --config: start one training at a time")
        if override.startswith("-"):
            raise SurfaceFusionError(f"{override} cannot be used with --config: give settings as key=value")
        if "=" not in override and not override.startswith("~"):
            raise SurfaceFusionError(f"{override} is not a setting: with --config, give key=value")


def _check_names(cfg: DictConfig) -> None:
    """Check the names of the task, the model and so on, which fairseq looks up without a message."""
    utils.import_user_module(cfg.common)  # may register names
    known = {"task": TASK_REGISTRY, "model": {**MODEL_REGISTRY, **ARCH_MODEL_REGISTRY}}
    known |= {section: registry["registry"] for section, registry in REGISTRIES.items()}
    for section, names in known.items():
        value = None if OmegaConf.is_missing(cfg, section) else cfg.get(section)
        name = value.get("_name") if isinstance(value, DictConfig) else value
        if name is None and section in ("task", "model", "criterion", "optimizer"):
            raise SurfaceFusionError(f"{section}._name is missing; add it to the file")
        if name is not None and name not in names:
            raise unknown_setting(f"{section}._name: there is no {section} {name}", name, names)


@contextlib.contextmanager
def _hydra_raises_its_errors() -> Iterator[None]:
    """Let hydra raise exceptions in the block, where it would print them and exit; ignore its warnings."""
    name = "HYDRA_FULL_ERROR"
    before = os.environ.get(name)
    os.environ[name] = "1"
    try:
        with warnings.catch_warnings():
            warnings.filterwarnings(
                "ignore", category=UserWarning, module=r"hydra\.|fairseq_cli\.hydra_train"
            )
            yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before
