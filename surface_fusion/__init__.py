"""Encoder layer fusion for fairseq: load with ``--user-dir surface_fusion``.

Importing the package registers its models, criteria and optimizers with fairseq and repairs fairseq
(``compat``): at once if fairseq is imported already, otherwise right after it is. Until then nothing else is
imported, so ``encoder_fusion``, ``ops`` and ``scoring`` work where fairseq is not installed. Packages that
need fairseq import it in their ``__init__``, which registers everything before their modules are loaded.
"""

import contextlib
import logging
import sys
from collections.abc import Iterator, Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from surface_fusion.errors import SurfaceFusionError
from surface_fusion.version import __version__

if TYPE_CHECKING:
    from surface_fusion.inference.translator import Translator
    from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel

__all__ = ["SurfaceFusionError", "SurfaceFusionModel", "Translator", "__version__", "register"]

_registered = False
_failure: BaseException | None = None
"""What ended the first registration; a second one would repair and register some parts twice."""


def register() -> None:
    """Import fairseq, repair it, and register the package's components with it; once per process.

    Raises:
        ImportError: fairseq or a part of this package cannot be imported.
    """
    import fairseq  # noqa: F401  (the first import calls this function, by _RegisterAfterFairseq)

    global _registered, _failure
    if _failure is not None:
        raise ImportError("surface_fusion could not be registered with fairseq before") from _failure
    if _registered:
        return
    _registered = True
    try:
        with _root_logger_left_alone():
            _register_components()
    except BaseException as error:
        _failure = error
        raise


def _register_components() -> None:
    from surface_fusion.compat.repairs import apply
    from surface_fusion.hooks import generator_hook

    generator_hook.install()  # inside the repairs of the same function, which may change its settings
    apply()

    from surface_fusion.criterions import fused_label_smoothed_cross_entropy  # noqa: F401
    from surface_fusion.hooks import trainer_hook
    from surface_fusion.models import architectures  # noqa: F401
    from surface_fusion.optim import flat_adam  # noqa: F401

    trainer_hook.install()


def __getattr__(name: str) -> Any:
    """``SurfaceFusionModel`` and ``Translator``, which are imported when they are first used."""
    if name == "SurfaceFusionModel":
        from surface_fusion.models.transformer_surface_fusion import SurfaceFusionModel

        return SurfaceFusionModel
    if name == "Translator":
        from surface_fusion.inference.translator import Translator

        return Translator
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


class _RegisterAfterFairseq(MetaPathFinder):
    """Calls :func:`register` when the import of fairseq has ended."""

    def find_spec(
        self, name: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        """Return fairseq's specification, with a loader that also calls :func:`register`."""
        if name != "fairseq":
            return None
        # By name: a reload of this module adds a finder of another class.
        others = (finder for finder in sys.meta_path if type(finder).__name__ != type(self).__name__)
        spec = next(filter(None, (finder.find_spec(name, path, target) for finder in others)), None)
        if spec is not None and spec.loader is not None:
            execute = spec.loader.exec_module

            def execute_and_register(module: ModuleType) -> None:
                with _root_logger_left_alone():
                    execute(module)
                register()

            spec.loader.exec_module = execute_and_register  # type: ignore[method-assign]
        return spec


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
    sys.meta_path.insert(0, _RegisterAfterFairseq())
