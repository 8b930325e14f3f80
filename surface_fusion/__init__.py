"""Encoder layer fusion for fairseq: load with ``--user-dir surface_fusion``.

Importing the package registers its models, criteria and optimizers with fairseq and repairs fairseq
(``compat``): at once if fairseq is imported already, otherwise as soon as it is. Until then nothing else is
imported, and the modules in ``WITHOUT_FAIRSEQ`` work where fairseq is not installed.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.version import __version__

if TYPE_CHECKING:
    from surface_fusion import compat
    from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel

__all__ = ["SurfaceFusionError", "SurfaceFusionModel", "__version__", "compat", "register"]

WITHOUT_FAIRSEQ = ("encoder_fusion", "errors", "io", "ops", "scoring", "version")

_registered = False


def register() -> None:
    """Import fairseq, register the package's components with it, and repair it; once per process."""
    import fairseq  # noqa: F401  (the first import calls this function again, by _RegisterOnImport)

    global _registered
    if _registered:
        return
    _registered = True
    with _root_logger_left_alone():
        from surface_fusion import compat

        compat.apply()

        from surface_fusion.criterions import fused_label_smoothed_cross_entropy  # noqa: F401
        from surface_fusion.models import architectures  # noqa: F401
        from surface_fusion.optim import flat_adam  # noqa: F401
        from surface_fusion.training import hook

        hook.install()


def __getattr__(name: str) -> Any:
    """``SurfaceFusionModel``, which is imported when it is first used."""
    if name == "SurfaceFusionModel":
        from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel

        return SurfaceFusionModel
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _RegisterOnImport(MetaPathFinder):
    """Calls :func:`register` after fairseq is imported, and before a module of ours that needs fairseq is.

    The latter because registration imports most of the package: a module that imports fairseq itself would
    be needed before its import has ended.
    """

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return the specification of fairseq, or of a module of ours that registration has imported."""
        if name == "fairseq":
            return self._fairseq(name, path, target)
        package, _, rest = name.partition(".")
        if _registered or package != __name__ or rest.partition(".")[0] in WITHOUT_FAIRSEQ:
            return None
        register()
        module = sys.modules.get(name)
        if module is None:
            return None
        # The import system uses the __spec__ of a module that has been imported meanwhile.
        module.__spec__ = ModuleSpec(name, _Imported(module))
        return module.__spec__

    def _fairseq(self, name: str, path: Sequence[str] | None, target: ModuleType | None) -> ModuleSpec | None:
        others = (finder.find_spec(name, path, target) for finder in sys.meta_path if finder is not self)
        spec = next(filter(None, others), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                with _root_logger_left_alone():
                    execute(module)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


class _Imported(Loader):
    """Loads a module that is imported already: returns it as it is."""

    def __init__(self, module: ModuleType) -> None:
        self.module, self.spec = module, module.__spec__

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        """Return the module."""
        return self.module

    def exec_module(self, module: ModuleType) -> None:
        """Restore the module's own specification; it is not executed again."""
        module.__spec__ = self.spec


@contextlib.contextmanager
def _root_logger_left_alone() -> Iterator[None]:
    """Prevent fairseq's tasks from configuring the root logger on import."""
    # logging.basicConfig does nothing if there is a handler.
    root, handler = logging.getLogger(), logging.NullHandler()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)


if sys.modules.get("fairseq") is not None:
    register()
else:
    sys.meta_path.insert(0, _RegisterOnImport())
