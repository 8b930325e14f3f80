"""Pass a fast generator class to ``FairseqTask.build_generator`` when the caller passes none."""

from collections.abc import Callable
from typing import Any

from fairseq.tasks import FairseqTask
from omegaconf import DictConfig

from surface_fusion.compat.patching import wrap


def install() -> None:
    """Let ``FairseqTask.build_generator`` make a generator with fast beam search where it can be used."""
    wrap(FairseqTask, "build_generator", _build_generator)


def _build_generator(
    original: Callable[..., Any],
    task: FairseqTask,
    models: Any,
    args: Any,
    seq_gen_cls: type | None = None,
    extra_gen_cls_kwargs: dict[str, Any] | None = None,
    *others: Any,
    **kwargs: Any,
) -> Any:
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

    each = getattr(models, "models", models) or [None]  # --score-reference needs no models
    if seq_gen_cls is None and all(map(supports_fast_search, each)):
        settings: Any = dict(args) if isinstance(args, DictConfig) else vars(args)
        check_ranges(settings)
        check_generation(settings)
        seq_gen_cls = FastSequenceGenerator
        if getattr(args, "print_alignment", False):  # fairseq passes this on only with its default class
            seq_gen_cls = FastSequenceGeneratorWithAlignment
            extra_gen_cls_kwargs = {**(extra_gen_cls_kwargs or {}), "print_alignment": args.print_alignment}
    return original(task, models, args, seq_gen_cls, extra_gen_cls_kwargs, *others, **kwargs)
