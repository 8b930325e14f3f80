"""Let ``interactive`` print one ``H-`` line per input line."""

import contextlib
import functools
import itertools
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch
from fairseq.tasks.translation import TranslationTask
from fairseq_cli import interactive

from surface_fusion.compat.hub import empty_hypothesis, position_limit, warn_of_overlong_line
from surface_fusion.compat.patching import Original, repair, replaced
from surface_fusion.compat.search_options import SourceAlignment
from surface_fusion.compat.shards import refuse_shards
from surface_fusion.errors import SurfaceFusionError
from surface_fusion.io.lines import iterate_lines


class _Lines(list[str]):
    """Lines that are translated together; ``first`` is the number of the first one."""

    first = 1


@repair("fairseq_cli.interactive.buffered_read", probe="carriage_return_ends_typed_line")
def read_buffers(buffered_read: Original, input: str, buffer_size: int) -> Iterator[_Lines]:
    """Split the input of ``interactive`` at line feeds only."""
    if input == "-" and sys.stdin is None:
        raise SurfaceFusionError("standard input is closed; redirect the text to it, or add --input FILE")
    with contextlib.nullcontext(sys.stdin) if input == "-" else open(input, "rb") as stream:
        texts = (line.strip() for line in iterate_lines(stream))
        for first in itertools.count(1, buffer_size):
            lines = _Lines(itertools.islice(texts, buffer_size))
            if not lines:
                return
            lines.first = first
            yield lines


@repair("fairseq_cli.interactive.make_batches", probe="interactive_fails_on_long_line")
def batch_each_line(
    make_batches: Original, lines: list[str], cfg: Any, task: Any, max_positions: Any, encode_fn: Any
) -> Iterator[Any]:
    """Add a batch with an empty hypothesis for each line of ``interactive`` that is too long or empty.

    A warning with the number of a line that is too long is logged. For an empty line a translation model
    would generate a sentence.
    """
    refuse_shards("interactive")
    if cfg.generation.print_alignment == "soft":
        raise SurfaceFusionError("--print-alignment soft works in generate only; give --print-alignment hard")
    encode, constrained = functools.cache(encode_fn), cfg.generation.constraints
    texts = [line.split("\t")[0] if constrained else line for line in lines]
    rows, _ = task.get_interactive_tokens_and_lengths(texts, encode)
    limit, least = position_limit(max_positions, "source"), 2 if isinstance(task, TranslationTask) else 0
    indices = [i for i, row in enumerate(rows) if least <= len(row) <= limit]
    kept, untranslated = [lines[i] for i in indices], set(range(len(rows)))
    for batch in make_batches(kept, cfg, task, max_positions, encode) if kept else ():
        ids = [indices[i] for i in batch.ids.tolist()]
        untranslated.difference_update(ids)
        infer = functools.partial(_infer_with_texts, task.inference_step, [encode(texts[i]) for i in ids])
        with replaced(task, "inference_step", infer):
            yield batch._replace(ids=torch.tensor(ids))
    for i in sorted(untranslated):
        row, number = rows[i], getattr(lines, "first", 1) + i
        if len(row) > limit:
            warn_of_overlong_line(number, len(row), limit)
        elif len(row) >= least:
            warn_of_overlong_line(number, len(row), cfg.dataset.max_tokens, "--max-tokens allows")
        constraints = torch.zeros(1, 1, dtype=torch.long) if constrained else None
        empty = [[empty_hypothesis(task.target_dictionary.eos())]]
        with replaced(task, "inference_step", lambda *args, result=empty, **kwargs: result):
            yield interactive.Batch(torch.tensor([i]), row[None], torch.tensor([len(row)]), constraints)


def _infer_with_texts(infer: Callable[..., Any], texts: list[str], *args: Any, **kwargs: Any) -> Any:
    """The hypotheses by *infer*, whose alignments also have the *texts*, for ``--replace-unk``."""
    results = infer(*args, **kwargs)
    for text, hypotheses in zip(texts, results, strict=True):
        for hypothesis in hypotheses:
            hypothesis["alignment"] = SourceAlignment(hypothesis["alignment"], text)
    return results
