"""What fairseq keeps in a process beyond the training that it belongs to."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils
from fairseq.logging import progress_bar
from fairseq.trainer import Trainer

from surface_fusion.compat.patching import wrap


def start_each_training_anew() -> None:
    """Let several trainings in one process (a hydra multirun, ``main`` called twice) not see each other.

    fairseq keeps on its functions the best validation value (so that the second training's
    ``checkpoint_best.pt`` follows the first's, or is never written) and what ``--patience`` counts. Handlers
    of ``--log-file`` stay, so that the second's lines go into the first's file, too, and so do tensorboard's
    writers, by subset, with the first's folder.
    """

    def init(original: Callable[..., None], trainer: Any, cfg: Any, *args: Any, **kwargs: Any) -> None:
        forget_last_training(getattr(getattr(cfg, "common", None), "log_file", None))
        original(trainer, cfg, *args, **kwargs)

    wrap(Trainer, "__init__", init)


def forget_last_training(log_file: Any = None) -> None:
    """Forget all of it but the handler of *log_file*, which fairseq has added before its trainer."""
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    for module in map(sys.modules.get, ("fairseq_cli.train", "__main__")):
        should_stop_early = getattr(module, "should_stop_early", None)
        for name in ("best", "num_runs"):
            vars(should_stop_early).pop(name, None) if callable(should_stop_early) else None
    for name in ("fairseq_cli.train", "__main__", progress_bar.__name__):
        files = [h for h in logging.getLogger(name).handlers if isinstance(h, logging.FileHandler)]
        for handler in files[:-1] if log_file is not None and name != progress_bar.__name__ else files:
            logging.getLogger(name).removeHandler(handler)
            handler.close()
    writers = getattr(progress_bar, "_tensorboard_writers", {})
    for writer in writers.values():
        writer.close()
    writers.clear()
