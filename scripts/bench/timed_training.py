"""Run and time ``fairseq-train``: a child process of ``train.py``.

    python timed_training.py OUT.json COLD STEADY MAX TRAINING-FLAGS...

The steady state begins after COLD updates or ten updates of the second epoch, whichever is later: batches of
all shapes have then occurred. The training ends STEADY updates later, or after MAX updates. The clock wraps
the construction of the trainer and two methods of fairseq's ``Trainer``, which ``SurfaceFusionTrainer``, a
subclass, calls by ``super()``. The plugin is loaded only if the flags name it (``--user-dir``). OUT.json
contains:

* ``seconds``: time from the start of the trainer's construction to the end of each update;
* ``tokens``: target tokens of this process in each update, without padding; updates skipped by an overflow
  are not listed;
* ``pauses``: [updates before it, seconds] for each start of an epoch except the first, from the end of the
  last update to the arrival of the first batch;
* ``steady_from``: number of updates before the steady state, or null;
* ``pairs``: sentence pairs in the training set;
* ``peak_gib``: GPU memory that torch reserves; on a CPU, resident memory.
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
"""Updates of the second epoch before the steady state."""


class Clock:
    """The measurements, taken around the trainer's construction and two of its methods."""

    def __init__(self, cold: int, steady: int, max_updates: int) -> None:
        self.cold, self.steady, self.max_updates = cold, steady, max_updates
        self.seconds: list[float] = []
        self.tokens: list[int] = []
        self.pauses: list[tuple[int, float]] = []
        self.steady_from: int | None = None
        self.pairs = 0
        self.peak_gib = 0.0
        self._start = 0.0
        self._epochs = 0
        self._first_batch = False

    def build(self, *args: Any, **kwargs: Any) -> Trainer:
        """Start the clock and make a trainer."""
        self._start = time.perf_counter()
        return Trainer(*args, **kwargs)

    def begin_epoch(self, original: Callable[..., Any], trainer: Any, epoch: int) -> Any:
        """Set the number of updates and call ``Trainer.begin_epoch``."""
        self._epochs += 1
        if self._epochs == 1:
            self.pairs = len(trainer.task.dataset(trainer.cfg.dataset.train_subset))
            trainer.cfg.optimization.max_update = self.max_updates
        else:
            self._first_batch = True
            if self.steady_from is None:
                self.steady_from = max(self.cold, len(self.seconds) + MARGIN)
                trainer.cfg.optimization.max_update = min(self.max_updates, self.steady_from + self.steady)
        return original(trainer, epoch)

    def train_step(self, original: Callable[..., Any], trainer: Any, samples: list[Any], *args: Any) -> Any:
        """Time ``Trainer.train_step``; the time of a step that overflows counts for the next update."""
        if self._first_batch:
            self._first_batch = False
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
        """Return the content of OUT.json."""
        names = ("seconds", "tokens", "pauses", "steady_from", "pairs", "peak_gib")
        return {name: getattr(self, name) for name in names}


def main() -> None:
    """Entry point."""
    if sys.argv[1:2] in (["-h"], ["--help"]):
        print(__doc__)
        return
    out, cold, steady, max_updates, *flags = sys.argv[1:]
    clock = Clock(int(cold), int(steady), int(max_updates))
    begin_epoch, train_step = Trainer.begin_epoch, Trainer.train_step
    fairseq_cli.train.Trainer = clock.build
    Trainer.begin_epoch = lambda *args: clock.begin_epoch(begin_epoch, *args)
    Trainer.train_step = lambda *args: clock.train_step(train_step, *args)

    to_config = fairseq_cli.train.convert_namespace_to_omegaconf

    def without_tpu(args: Any) -> Any:
        args.tpu = False  # fairseq sets it with --bf16
        return to_config(args)

    fairseq_cli.train.convert_namespace_to_omegaconf = without_tpu
    sys.argv[1:] = flags
    fairseq_cli.train.cli_main()
    from surface_fusion.io.atomic_write import write_text  # late: importing the package repairs fairseq

    write_text(out, json.dumps(clock.record()))
    sys.stdout.flush()
    os._exit(0)  # torch would wait 5 s for each of fairseq's data workers


if __name__ == "__main__":
    main()
