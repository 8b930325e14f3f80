"""Clear the state that a previous training left in this process."""

import logging
import sys
from typing import Any

from fairseq import checkpoint_utils
from fairseq.logging import progress_bar

from surface_fusion.compat.patching import Original, repair


@repair("fairseq.checkpoint_utils.load_checkpoint", probe="best_value_outlives_training")
def start_without_old_state(load: Original, cfg: Any, trainer: Any, *args: Any, **kwargs: Any) -> Any:
    """Clear the best value, the count of ``--patience`` and the log files of a previous training.

    Each training starts with this function. The next one of the process (of a hydra multirun, or a second
    call of ``main``) would otherwise compare with the previous best value, and log to the previous files.
    """
    clear_training_state(getattr(getattr(trainer.cfg, "common", None), "log_file", None))
    return load(cfg, trainer, *args, **kwargs)


def clear_training_state(log_file: str | None = None) -> None:
    """Clear the best values, the count of ``--patience``, the ``--log-file`` handlers, tensorboard's writers.

    Args:
        log_file: of the training that starts; fairseq has added its handler last, and it is kept.
    """
    vars(checkpoint_utils.save_checkpoint).pop("best", None)
    for name in ("fairseq_cli.train", "__main__", progress_bar.__name__):
        should_stop_early = getattr(sys.modules.get(name), "should_stop_early", None)
        if callable(should_stop_early):
            for attribute in ("best", "num_runs"):
                vars(should_stop_early).pop(attribute, None)
        logger = logging.getLogger(name)
        files = [handler for handler in logger.handlers if isinstance(handler, logging.FileHandler)]
        for handler in files[:-1] if log_file is not None and name != progress_bar.__name__ else files:
            logger.removeHandler(handler)
            handler.close()
    writers = getattr(progress_bar, "_tensorboard_writers", {})
    for writer in writers.values():
        writer.close()
    writers.clear()
