"""Make ``Trainer(...)`` return a ``SurfaceFusionTrainer``; also check settings and log notices.

fairseq has no registry of trainers; ``fairseq_cli.train`` calls ``Trainer(cfg, task, model, criterion)``, so
``Trainer.__new__`` is replaced. Settings are checked for SurfaceFusion models, with ``--sf-plain``, too;
notices are logged for every model.
"""

from argparse import Namespace
from typing import Any

from fairseq.trainer import Trainer

from surface_fusion.config.flags import config_of
from surface_fusion.config.ranges import check_config
from surface_fusion.training.notices import log_notices
from surface_fusion.training.trainer import SurfaceFusionTrainer

check_settings = True
"""Whether to check the settings; False while ``surface-fusion train`` runs, which has checked them."""


def install() -> None:
    """Let ``Trainer(...)`` make a :class:`SurfaceFusionTrainer` where :func:`uses_fast_trainer` says so."""
    Trainer.__new__ = staticmethod(_new)  # type: ignore[assignment, method-assign]


def uses_fast_trainer(cfg: Any, model: Any) -> bool:
    """Whether *model* is a SurfaceFusion model without ``--sf-plain``, and not on a TPU."""
    flags = config_of(model)
    ours = flags is not None and not flags.sf_plain
    return ours and not isinstance(cfg, Namespace) and not cfg.common.tpu


def _new(cls: type[Trainer], *args: Any, **kwargs: Any) -> Trainer:
    """``Trainer.__new__``; subclasses, whose arguments may differ, are left alone."""
    return object.__new__(_trainer_class(*args, **kwargs) if cls is Trainer and (args or kwargs) else cls)


def _trainer_class(cfg: Any, task: Any, model: Any, criterion: Any, quantizer: Any = None) -> type[Trainer]:
    """Check the settings of SurfaceFusion models, log notices, and return the class of the trainer."""
    if isinstance(cfg, Namespace):
        return Trainer
    if check_settings and config_of(model) is not None:
        check_config(cfg)
    log_notices(model, criterion, getattr(cfg.optimizer, "_name", None))
    return SurfaceFusionTrainer if uses_fast_trainer(cfg, model) else Trainer
