"""What ``import surface_fusion`` imports and when it registers the model, each in its own process.

Also tests ``model.py``, ``version.py`` and ``errors.py``.
"""

import subprocess
import sys

import pytest

from surface_fusion import SurfaceFusionModel
from tests.helpers.paths import ROOT

FORBID_FAIRSEQ = """
import sys

class Forbidden:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] == "fairseq":
            raise ImportError("fairseq is forbidden")

sys.meta_path.insert(0, Forbidden())
"""

IS_REGISTERED = """
import logging, sys
from fairseq import checkpoint_utils
from fairseq.criterions import CRITERION_REGISTRY
from fairseq.models import MODEL_REGISTRY
from fairseq.optim import OPTIMIZER_REGISTRY

assert "transformer_surface_fusion" in MODEL_REGISTRY
assert "fused_label_smoothed_cross_entropy" in CRITERION_REGISTRY and "flat_adam" in OPTIMIZER_REGISTRY
assert hasattr(checkpoint_utils.load_checkpoint_to_cpu, "__wrapped__"), "fairseq is not repaired"
for name, module in list(sys.modules.items()):
    if name.startswith("surface_fusion."):  # imported once and completely
        package, _, last = name.rpartition(".")
        assert getattr(sys.modules[package], last) is module, name
        assert module.__spec__.name == name and not module.__spec__._initializing, name
        assert module.__spec__.origin == module.__file__, name
"""


def run(code: str) -> None:
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr[-3000:]


def test_the_package_alone_imports_neither_torch_nor_fairseq() -> None:
    run(
        "import sys, surface_fusion; from surface_fusion import SurfaceFusionError, __version__;"
        "assert not {'torch', 'fairseq', 'numpy'} & {*sys.modules}, 'heavy'"
    )


def test_modules_that_need_no_fairseq_import_without_it() -> None:
    run(
        FORBID_FAIRSEQ
        + """
import surface_fusion.errors, surface_fusion.ops.distributions, surface_fusion.version
from surface_fusion.encoder_fusion import methods
import torch

states = [torch.randn(2, 3, 16) for _ in range(4)]
fusion = methods()["dwatt"](4, 16, bottleneck=4)
fusion.reset_parameters()
assert fusion(states).shape == (2, 3, 16)
assert methods()["fine-grained"](4, 16, 5)(states).shape == (2, 3, 80)
kept = []
assert methods()["dlcl"](4, 16, True, True)(states[0], kept).shape == (2, 3, 16)
assert "fairseq" not in sys.modules
try:
    from surface_fusion import SurfaceFusionModel
except ImportError as error:
    assert "forbidden" in str(error)
else:
    raise AssertionError
"""
    )


def test_the_deprecated_path_of_the_model_warns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delitem(sys.modules, "surface_fusion.model", raising=False)
    with pytest.warns(DeprecationWarning, match=r"surface_fusion\.model is deprecated"):
        from surface_fusion.model import SurfaceFusionModel as from_old_path
    assert from_old_path is SurfaceFusionModel


@pytest.mark.slow
@pytest.mark.parametrize(
    "first",
    [
        "import fairseq, surface_fusion",
        "import surface_fusion.encoder_fusion, fairseq.models",
        "from surface_fusion import SurfaceFusionModel, compat",
        # Modules that registration imports as well: their own import has not ended when it does.
        "import surface_fusion.config.encoder_fusion_flags",
        "import surface_fusion.sequence_generator",
        "import surface_fusion.compat.warning_filters",
        "from surface_fusion.decoding.eligibility import why_not_fast",
        "import importlib, surface_fusion; importlib.reload(surface_fusion)",
    ],
)
def test_the_model_is_registered_in_any_order_of_imports(first: str) -> None:
    run(first + IS_REGISTERED)


@pytest.mark.slow
def test_a_second_registration_is_harmless() -> None:
    twice = "import logging, surface_fusion; surface_fusion.register(); surface_fusion.register()"
    run(f"{twice}\nassert not logging.getLogger().handlers{IS_REGISTERED}")


@pytest.mark.slow
def test_a_spawned_process_is_registered() -> None:
    """It imports the module of the function that it is to run, here one that imports fairseq itself."""
    code = """
import multiprocessing
import surface_fusion
from fairseq.models import MODEL_REGISTRY
from surface_fusion.config.flags import SurfaceFusionConfig

if __name__ == "__main__":
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        config = pool.apply(SurfaceFusionConfig)
    assert config.surfacefusion is None
"""
    run(code)


@pytest.mark.slow
def test_a_failed_registration_is_reported_again() -> None:
    run(
        """
import sys
from importlib.abc import MetaPathFinder
import surface_fusion

class Broken(MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if name == "surface_fusion.optim.flat_adam":
            raise ImportError("broken")

broken = Broken()
sys.meta_path.insert(0, broken)
for _ in range(2):
    try:
        surface_fusion.register()
    except ImportError as error:
        message = f"{error} {error.__cause__}"
    else:
        raise AssertionError
assert message == "surface_fusion could not be registered with fairseq before broken", message
"""
    )
