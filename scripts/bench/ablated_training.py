"""Run ``fairseq-train`` with one optimisation off at a time: a child process of ``ablation.py``.

    python ablated_training.py WINDOW OUT.json COLD STEADY MAX TRAINING-FLAGS...

Every WINDOW updates the next variant of :data:`VARIANTS` takes its turn, in the same process: the first has
all optimisations, each other one lacks one of them. The other arguments are those of ``timed_training.py``.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest.mock import patch

import timed_training
from fairseq.trainer import Trainer
from omegaconf import DictConfig

from surface_fusion.criterions.fused_label_smoothed_cross_entropy import (
    FusedLabelSmoothedCrossEntropyCriterion,
)
from surface_fusion.criterions.statistics import OverlappedStatistics
from surface_fusion.modules.module_tree import ModuleTree
from surface_fusion.training.cached_config import CachedConfig
from surface_fusion.training.trainer import SurfaceFusionTrainer


@contextmanager
def without_cache(trainer: SurfaceFusionTrainer) -> Iterator[None]:
    """Let the settings be looked up through omegaconf."""
    roots = (trainer.cfg, trainer.task.cfg, getattr(trainer.lr_scheduler, "cfg", None))
    sections = [value for cfg in roots if isinstance(cfg, DictConfig) for value in (cfg, *cfg.values())]
    cached = [section for section in sections if type(section) is CachedConfig]
    for section in cached:
        for key in section:
            section.__dict__.pop(key, None)
        object.__setattr__(section, "__class__", DictConfig)
    try:
        yield
    finally:
        for section in cached:
            object.__setattr__(section, "__class__", CachedConfig)


def replaced(owner: type, name: str, value: Any) -> Callable[[SurfaceFusionTrainer], Any]:
    """Return a function that replaces an attribute in a ``with`` block."""
    return lambda trainer: patch.object(owner, name, value)


def nothing(*args: Any, **kwargs: Any) -> None:
    """Do nothing."""


VARIANTS: dict[str, Callable[[SurfaceFusionTrainer], Any]] = {
    "none": lambda trainer: ExitStack(),
    "forward prefetch": replaced(SurfaceFusionTrainer, "_launch_next_forward", nothing),
    "overlapped statistics": replaced(OverlappedStatistics, "expect", nothing),
    "cached settings": without_cache,
    "direct seeding": replaced(SurfaceFusionTrainer, "_set_seed", Trainer._set_seed),
    "module tree": replaced(ModuleTree, "in_mode", lambda *args: False),
    "asynchronous copy of the loss": replaced(
        FusedLabelSmoothedCrossEntropyCriterion, "_on_host", lambda self, logged: logged
    ),
}
"""What a variant lacks -> a function that returns the ``with`` block that switches it off."""


class Turns:
    """Runs :data:`VARIANTS` in turns of *window* updates; processes switch at the same updates."""

    def __init__(self, window: int) -> None:
        self.window = window
        self.active = ""
        self._off = ExitStack()

    def train_step(self, original: Callable[..., Any], trainer: Any, *args: Any, **kwargs: Any) -> Any:
        """Switch to the variant of the update, and run it."""
        names = list(VARIANTS)
        name = names[trainer.get_num_updates() // self.window % len(names)]
        if name != self.active:
            self._off.close()
            self._off.enter_context(VARIANTS[name](trainer))
            self.active = name
        return original(trainer, *args, **kwargs)


def main() -> None:
    """Entry point."""
    turns = Turns(int(sys.argv.pop(1)))
    original = SurfaceFusionTrainer.train_step
    step = partial(turns.train_step, original)
    SurfaceFusionTrainer.train_step = lambda *args, **kwargs: step(*args, **kwargs)  # type: ignore[method-assign]
    timed_training.main()


if __name__ == "__main__":
    main()
