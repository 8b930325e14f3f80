"""The table of repairs of fairseq, applied when this package is registered; ``docs/repairs.md`` shows it.

fairseq is no longer released. Each function marked by :func:`~surface_fusion.compat.patching.repair` wraps
attributes of it, and names a probe that shows the fault in plain fairseq. A test fails when a probe no longer
finds its fault: the repair can then be removed.
"""

import functools

from surface_fusion.compat import (
    batching,
    changed_data,
    checkpoint_allowlist,
    checkpoint_integrity,
    checkpoint_loading,
    checkpoint_saving,
    cpu_processes,
    eval_bleu,
    global_state,
    hub,
    interactive,
    line_endings,
    model_overrides,
    newest_checkpoint,
    numpy_names,
    resume,
    safe_eval,
    safe_readers,
    search_options,
    shards,
    tasks,
    time_limits,
    user_dir,
)
from surface_fusion.compat.checkpoint_loading import allow_checkpoint_classes
from surface_fusion.compat.patching import Repair
from surface_fusion.compat.warning_filters import filter_harmless_warnings

# Of one attribute, the repair applied last is the outermost.
MODULES = (
    # Run no code from files, and report files and settings that cannot be used.
    *(checkpoint_loading, model_overrides, safe_eval, checkpoint_allowlist, safe_readers),
    # Verify and save checkpoints. These check what those above have loaded.
    *(checkpoint_integrity, newest_checkpoint, checkpoint_saving, resume),
    # Data sets, generation and text files.
    *(batching, numpy_names, search_options, eval_bleu, hub, interactive, shards, line_endings),
    # Tasks and the state of a process. global_state clears the count of --patience before resume reads it.
    *(tasks, user_dir, changed_data, global_state),
    # Several processes. cpu_processes decides what time_limits gets.
    *(time_limits, cpu_processes),
)
"""The modules with repairs, in the order in which these are applied; within a module, as they are defined."""

REPAIRS: tuple[Repair, ...] = tuple(
    repair
    for module in MODULES
    for function in vars(module).values()
    if getattr(function, "__module__", None) == module.__name__
    for repair in getattr(function, "repairs", ())
)


@functools.cache
def apply() -> None:
    """Apply all repairs, once per process."""
    filter_harmless_warnings()
    allow_checkpoint_classes()
    for repair in REPAIRS:
        repair.apply()
