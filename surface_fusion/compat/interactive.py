"""Let ``interactive`` print one ``H-`` line per input line."""

import contextlib
import functools
import logging
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq.tasks.translation import TranslationTask
from fairseq_cli import interactive
from torch import Tensor

from surface_fusion.compat.hub import empty_hypothesis, overlong_line_warning, position_limit
from surface_fusion.compat.patching import replaced
from surface_fusion.compat.search_options import SourceAlignment
from surface_fusion.compat.shards import refuse_shards
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.io.lines import iterate_lines

logger = logging.getLogger(__name__)


class _Lines(list[str]):
    """Lines that are translated together; ``before`` is the number of lines read before them."""

    before = 0


def read_buffers(buffered_read: Callable[..., Any], input: str, buffer_size: int) -> Iterator[_Lines]:
    """fairseq's ``buffered_read``, which yields lists of lines; splits them at line feeds only."""
    if input == "-" and sys.stdin is None:
        raise SurfaceFusionError("standard input is closed; redirect the text to it, or add --input FILE")
    with contextlib.nullcontext(sys.stdin) if input == "-" else open(input, "rb") as stream:
        lines = _Lines()
        for line in iterate_lines(stream):
            lines.append(line.strip())
            if len(lines) == buffer_size:
                yield lines
                before, lines = lines.before + len(lines), _Lines()
                lines.before = before
        if lines:
            yield lines


def batch_each_line(
    make_batches: Callable[..., Any],
    lines: list[str],
    cfg: Any,
    task: Any,
    max_positions: Any,
    encode_fn: Callable[[str], str],
) -> Iterator[Any]:
    """fairseq's ``make_batches``, then a batch with an empty hypothesis for each line that it leaves out.

    A warning with the number of the line is logged. Empty lines get an empty hypothesis too; a translation
    model would generate a sentence for them.
    """
    refuse_shards("interactive")
    if cfg.generation.print_alignment == "soft":
        raise SurfaceFusionError("--print-alignment soft works in generate only; give --print-alignment hard")
    before = getattr(lines, "before", 0)
    encode = functools.cache(encode_fn)
    constrained = cfg.generation.constraints
    texts = [line.split("\t")[0] if constrained else line for line in lines]
    rows, _ = task.get_interactive_tokens_and_lengths(texts, encode)
    limit, least = position_limit(max_positions, "source"), 2 if isinstance(task, TranslationTask) else 0
    indices = [i for i, row in enumerate(rows) if least <= len(row) <= limit]
    missing = {i for i, row in enumerate(rows) if len(row) > 1 or least == 0}
    kept = [lines[i] for i in indices]
    for batch in make_batches(kept, cfg, task, max_positions, encode) if kept else ():
        ids = [indices[i] for i in batch.ids.tolist()]
        missing.difference_update(ids)
        with _source_texts(task, [encode(texts[i]) for i in ids]):
            yield batch._replace(ids=torch.tensor(ids))
    for i in sorted(missing):
        by_model = (limit, "the model takes")
        why = by_model if len(rows[i]) > limit else (cfg.dataset.max_tokens, "--max-tokens allows")
        logger.warning(overlong_line_warning(before + i + 1, len(rows[i]), *why))
    for i in sorted(missing | {i for i in range(len(rows)) if i not in indices}):
        yield from _untranslated(i, rows[i], task, constrained)


@contextlib.contextmanager
def _source_texts(task: Any, texts: list[str]) -> Iterator[None]:
    """Let *task* add the text of each sentence of a batch to its alignments, for ``--replace-unk``."""
    infer = task.inference_step

    def inference_step(*args: Any, **kwargs: Any) -> Any:
        results = infer(*args, **kwargs)
        for text, hypotheses in zip(texts, results, strict=True):
            for hypothesis in hypotheses:
                hypothesis["alignment"] = SourceAlignment.of(hypothesis["alignment"], text)
        return results

    with replaced(task, "inference_step", inference_step):
        yield


def _untranslated(index: int, row: Tensor, task: Any, constrained: bool) -> Iterator[interactive.Batch]:
    """Yield a batch of one line, for which the task returns an empty hypothesis."""

    def inference_step(*args: Any, **kwargs: Any) -> list[list[dict[str, Any]]]:
        return [[empty_hypothesis(task.target_dictionary.eos())]]

    constraints = torch.zeros(1, 1, dtype=torch.long) if constrained else None
    task.inference_step = inference_step
    try:
        yield interactive.Batch(torch.tensor([index]), row[None], torch.tensor([len(row)]), constraints)
    finally:
        del task.inference_step
