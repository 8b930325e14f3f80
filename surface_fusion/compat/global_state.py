"""Clear the state that a previous training left in this process."""

import logging
import sys
from collections.abc import Callable
from typing import Any

from fairseq import checkpoint_utils
from fairseq.logging import progress_bar


def start_without_old_state(
    load_checkpoint: Callable[..., Any], cfg: Any, trainer: Any, *args: Any, **kwargs: Any
) -> Any:
    """fairseq's ``load_checkpoint``, with which each training starts; clears the state of the previous one.

    The next training of the process (of a hydra multirun, or a second call of ``main``) would otherwise
    compare its validation values with the previous best, and log to the previous files.
    """
    clear_training_state(getattr(getattr(trainer.cfg, "common", None), "log_file", None))
    return load_checkpoint(cfg, trainer, *args, **kwargs)


def clear_training_state(log_file: str | None = None) -> None:
    """Clear the best values, the count of ``--patience``, the ``--log-file`` handlers, tensorboard's writers.

    Args:
        log_file: of the training that starts; fairseq has added its handler last, and it is kept.
    """
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    for module in map(sys.modules.get, ("fairseq_cli.train", "__main__")):
        should_stop_early = getattr(module, "should_stop_early", None)
        if callable(should_stop_early):
            for name in ("best", "num_runs"):
                vars(should_stop_early).pop(name, None)
    for name in ("fairseq_cli.train", "__main__", progress_bar.__name__):
        files = [h for h in logging.getLogger(name).handlers if isinstance(h, logging.FileHandler)]
        for handler in files[:-1] if log_file is not None and name != progress_bar.__name__ else files:
            logging.getLogger(name).removeHandler(handler)
            handler.close()
    writers = getattr(progress_bar, "_tensorboard_writers", {})
    for writer in writers.values():
        writer.close()
    writers.clear()
