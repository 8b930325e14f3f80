"""The repairs of fairseq, applied when this package is registered; ``docs/repairs.md`` shows them.

fairseq is no longer released. Each function marked by :func:`~surface_fusion.compat.patching.repair` wraps
attributes of it, and names a probe that shows the fault in plain fairseq. A test fails when a probe no longer
finds its fault: the repair can then be removed.
"""

import functools
import importlib

from surface_fusion.compat.checkpoint_loading import allow_checkpoint_classes
from surface_fusion.compat.patching import Repair
from surface_fusion.compat.warning_filters import filter_harmless_warnings

MODULES = (
    # Run no code from files, and report files and settings that cannot be used.
    *("checkpoint_loading", "model_overrides", "safe_eval", "checkpoint_allowlist", "safe_readers"),
    # Verify and save checkpoints, and resume from them. These check what those above have loaded.
    *("checkpoint_integrity", "newest_checkpoint", "checkpoint_saving", "resume"),
    # Data sets, generation and text files.
    *("batching", "numpy_names", "search_options", "eval_bleu", "hub", "interactive", "shards"),
    *("line_endings", "tasks", "user_dir", "changed_data", "nan_detector"),
    # The state of a process: this clears the count of --patience before the repairs of resume run.
    "global_state",
    # Several processes: cpu_processes decides what time_limits gets.
    *("time_limits", "cpu_processes"),
)
"""The modules with repairs, in the order in which these are applied; within a module, as they are defined.

Of one attribute, the wrapper applied last is the outermost.
"""

REPAIRS: tuple[Repair, ...] = tuple(
    repair
    for name in MODULES
    for function in vars(importlib.import_module(f"{__package__}.{name}")).values()
    if getattr(function, "__module__", None) == f"{__package__}.{name}"
    for repair in getattr(function, "repairs", ())
)


@functools.cache
def apply() -> None:
    """Apply all repairs, once per process."""
    filter_harmless_warnings()
    allow_checkpoint_classes()
    for repair in REPAIRS:
        repair.apply()
