"""Mixin for modules that torch.jit.script cannot compile."""

from typing import NoReturn

from surface_fusion.errors import SurfaceFusionError


class NotScriptable:
    """Mixin for modules that can be traced (``torch.jit.trace``) but not scripted."""

    def __prepare_scriptable__(self) -> NoReturn:
        """Raise SurfaceFusionError; ``torch.jit.script`` calls this method before it compiles."""
        raise SurfaceFusionError(
            f"torch.jit.script cannot compile {type(self).__name__}, which calls fairseq by super(); "
            "use torch.jit.trace, or a model trained with --sf-plain and without fusion flags"
        )
