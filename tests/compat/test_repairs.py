"""The table of repairs: each is still needed, and importing the package replaces nothing else."""

import inspect
import json
import runpy
import sys
from importlib.util import find_spec

import pytest

from surface_fusion.compat.repairs import MODULES as REPAIRING
from surface_fusion.compat.repairs import REPAIRS
from tests.compat.probes.__main__ import MODULES
from tests.helpers import warm_processes
from tests.helpers.paths import ROOT

SAFE_CLASSES = ("namespace_is_refused", "torch.serialization")
"""The probe of ``allow_checkpoint_classes``, which replaces no attribute."""

PROBES = sorted({SAFE_CLASSES, *((repair.probe, repair.owner) for repair in REPAIRS)})


@pytest.fixture(scope="module")
def plain_fairseq() -> dict[tuple[str, str], bool]:
    """Result of each of ``PROBES``."""
    done = warm_processes.run("tests.compat.probes.__main__:main", text=json.dumps(PROBES))
    assert done.returncode == 0, done.stderr[-3000:]
    return dict(zip(PROBES, json.loads(done.stdout.splitlines()[-1]), strict=True))


@pytest.mark.slow
@pytest.mark.parametrize(("probe", "owner"), PROBES)
def test_fairseq_has_the_fault(plain_fairseq: dict[tuple[str, str], bool], probe: str, owner: str) -> None:
    assert plain_fairseq[probe, owner], f"{owner} no longer has the fault {probe}: remove its repair"


def test_each_probe_belongs_to_a_repair() -> None:
    functions = {
        name
        for module in MODULES
        for name, value in vars(module).items()
        if inspect.isfunction(value) and value.__module__ == module.__name__ and value.__annotations__
        if value.__annotations__["return"] is bool and not name.startswith("_")
    }
    assert functions == {probe for probe, _ in PROBES}


def test_each_module_with_a_repair_is_listed() -> None:
    """A repair of another module would not be applied."""
    modules = (ROOT / "surface_fusion" / "compat").glob("*.py")
    assert {path.stem for path in modules if "\n@repair(" in path.read_text()} == set(REPAIRING)


WATCHED = ("fairseq", "fairseq_cli", "torch", "omegaconf", "argparse", "hydra")
"""Packages of which importing this package could replace functions and classes."""

HOOKS = {
    "fairseq.tasks.fairseq_task.FairseqTask.build_generator",
    "fairseq.trainer.Trainer.__new__",
}
"""Replaced to choose the generator and the trainer."""


@pytest.mark.slow
def test_the_import_replaces_the_attributes_in_the_table() -> None:
    watched = sorted(name for name in sys.modules if name.split(".")[0] in WATCHED)
    done = warm_processes.run("tests.helpers.replaced_attributes:main", text=json.dumps(watched))
    assert done.returncode == 0, done.stderr[-3000:]
    replaced = set(json.loads(done.stdout.splitlines()[-1]))
    assert replaced == {repair.name for repair in REPAIRS} | HOOKS


def test_of_the_trainer_only_the_loading_of_checkpoints_is_repaired() -> None:
    """Those need the trainer's flags and schedule; all else is left to SurfaceFusionTrainer."""
    assert {r.name for r in REPAIRS if "trainer" in r.owner} == {"fairseq.trainer.Trainer.load_checkpoint"}


@pytest.mark.skipif(
    find_spec("fairseq.models.multires_hubert") is None, reason="the page lists the modules of ve-fairseq"
)
def test_the_page_of_repairs_is_current() -> None:
    script = runpy.run_path(str(ROOT / "scripts" / "docs" / "repairs.py"))
    assert script["PAGE"].read_text(encoding="utf-8") == script["page"](), "run scripts/docs/repairs.py"
