"""``StatefulContainer``, a part of each task: no endless recursion in copy and pickle."""

from typing import Any

from surface_fusion.compat.patching import Original, repair


@repair("fairseq.tasks.fairseq_task.StatefulContainer.__getattr__", probe="task_cannot_be_copied")
def find_no_attribute_before_init(get: Original, container: Any, name: str) -> Any:
    """Raise AttributeError while a task's state is empty, where fairseq recurses without end.

    ``copy`` and ``pickle`` look up ``__setstate__`` on an empty instance.
    """
    if "_factories" not in vars(container):
        raise AttributeError(f"{type(container).__name__} has no {name} yet")
    return get(container, name)
