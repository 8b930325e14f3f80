"""A fairseq training as the command line runs it, with a clock: a child process of ``train.py``.

    python timed_training.py OUT.json COLD STEADY MOST TRAINING-FLAGS...

It ends STEADY updates after every shape has been seen, that is after COLD updates or ten updates into the
second epoch, whichever is later; or after MOST updates. OUT.json:

* ``seconds`` since fairseq began to build its trainer, after each update;
* ``tokens`` of each update: target, without padding, all of this process (none where an overflow skipped it);
* ``pauses``: [updates done, seconds] of each start of an epoch but the first, from the end of the last update
  until the first batch has come from the data loader;
* ``steady_from``: number of updates after which the steady state begins, or null;
* ``pairs``: sentence pairs in the training set;
* ``peak_gib``: GPU memory taken from the driver, on a CPU the process's resident memory.
"""

import json
import os
import resource
import sys
import time
from collections.abc import Callable
from typing import Any

import fairseq_cli.train
import torch
from fairseq.trainer import Trainer

MARGIN = 10
"""Updates into the second epoch before the state counts as steady."""


class Clock:
    """What is measured, by standing around three methods of fairseq's trainer."""

    def __init__(self, cold: int, steady: int, most: int) -> None:
        self.cold, self.steady, self.most = cold, steady, most
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.pauses: list[tuple[int, float]] = []
        self.steady_from: int | None = None
        self.pairs = 0
        self.peak_gib = 0.0
        self._start = 0.0
        self._epochs = 0
        self._epoch_began = False

    def build(self, original: Callable[..., None], trainer: Any, *args: Any, **kwargs: Any) -> None:
        """fairseq's ``Trainer.__init__``."""
        self._start = time.perf_counter()
        original(trainer, *args, **kwargs)

    def begin_epoch(self, original: Callable[..., Any], trainer: Any, epoch: int) -> Any:
        """fairseq's ``Trainer.begin_epoch``."""
        self._epochs += 1
        if self._epochs == 1:
            self.pairs = len(trainer.task.dataset(trainer.cfg.dataset.train_subset))
            trainer.cfg.optimization.max_update = self.most
        else:
            self._epoch_began = True
            if self.steady_from is None:
                self.steady_from = max(self.cold, len(self.seconds) + MARGIN)
                trainer.cfg.optimization.max_update = min(self.most, self.steady_from + self.steady)
        return original(trainer, epoch)

    def train_step(self, original: Callable[..., Any], trainer: Any, samples: list[Any], *args: Any) -> Any:
        """fairseq's ``Trainer.train_step``; an overflow is no update, its time is."""
        if self._epoch_began:
            self._epoch_began = False
            self.pauses.append((len(self.seconds), time.perf_counter() - self._start - self.seconds[-1]))
        result = original(trainer, samples, *args)
        if trainer.get_num_updates() > len(self.seconds):
            self.seconds.append(time.perf_counter() - self._start)
            self.tokens.append(sum(int(sample["ntokens"]) for sample in samples if sample))
        if trainer.cuda:
            self.peak_gib = max(self.peak_gib, torch.cuda.memory_reserved() / 2**30)
        else:
            self.peak_gib = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20
        return result

    def record(self) -> dict[str, Any]:
        """The content of OUT.json."""
        names = ("seconds", "tokens", "pauses", "steady_from", "pairs", "peak_gib")
        return {name: getattr(self, name) for name in names}


def main() -> None:
    """Entry point."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return
    out, cold, steady, most, *flags = sys.argv[1:]
    clock = Clock(int(cold), int(steady), int(most))
    build, begin_epoch, train_step = Trainer.__init__, Trainer.begin_epoch, Trainer.train_step
    setattr(Trainer, "__init__", lambda *args, **kwargs: clock.build(build, *args, **kwargs))  # noqa: B010
    Trainer.begin_epoch = lambda *args: clock.begin_epoch(begin_epoch, *args)
    Trainer.train_step = lambda *args: clock.train_step(train_step, *args)

    to_config = fairseq_cli.train.convert_namespace_to_omegaconf

    def without_tpu(args: Any) -> Any:
        args.tpu = False  # fairseq takes --bf16 for a TPU
        return to_config(args)

    fairseq_cli.train.convert_namespace_to_omegaconf = without_tpu
    sys.argv[1:] = flags
    fairseq_cli.train.cli_main()
    from surface_fusion.io.atomic_write import (
        write_text,  # not sooner: importing it changes fairseq's trainer
    )

    write_text(out, json.dumps(clock.record()))
    sys.stdout.flush()
    os._exit(0)  # torch would wait 5 s for each of fairseq's data workers, whose batches nobody wants


if __name__ == "__main__":
    main()
