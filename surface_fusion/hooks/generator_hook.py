"""Pass a fast generator class to ``FairseqTask.build_generator`` when the caller passes none."""

from typing import Any

from fairseq.tasks import FairseqTask
from omegaconf import DictConfig

from surface_fusion.compat.patching import Original, arguments, wrap


def install() -> None:
    """Let ``FairseqTask.build_generator`` make a generator with fast beam search where it can be used."""
    wrap(FairseqTask, "build_generator", _build_generator)


def _build_generator(original: Original, *args: Any, **kwargs: Any) -> Any:
    """Call ``FairseqTask.build_generator`` with a fast class in place of fairseq's default.

    A class given by the caller is kept, and so is fairseq's default if any of *models* is not of this package
    or does not support fast decoding (``--sf-plain`` among others). The search strategy is fairseq's choice;
    with ``--score-reference`` fairseq ignores the class.

    Raises:
        SurfaceFusionError: a setting of a SurfaceFusion model's search is invalid.
    """
    # Imported here: it may itself be the module whose import registers this hook.
    from surface_fusion.config.ranges import check_generation, check_ranges
    from surface_fusion.sequence_generator import (
        FastSequenceGenerator,
        FastSequenceGeneratorWithAlignment,
        supports_fast_search,
    )

    given = arguments(original, *args, **kwargs)
    each = getattr(given["models"], "models", given["models"]) or [None]  # --score-reference needs no models
    if given["seq_gen_cls"] is None and all(map(supports_fast_search, each)):
        settings: Any = dict(given["args"]) if isinstance(given["args"], DictConfig) else vars(given["args"])
        check_ranges(settings)
        check_generation(settings)
        given["seq_gen_cls"] = FastSequenceGenerator
        alignment = settings.get("print_alignment")
        if alignment:  # fairseq passes this on only with its default class
            given["seq_gen_cls"] = FastSequenceGeneratorWithAlignment
            more = given["extra_gen_cls_kwargs"] or {}
            given["extra_gen_cls_kwargs"] = {**more, "print_alignment": alignment}
    return original(**given)
