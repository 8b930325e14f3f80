"""Return one result per input line, in input order. ``interactive.py`` uses these functions, too."""

import logging
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from surface_fusion.compat.patching import replaced
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def position_limit(max_positions: Any, side: Literal["source", "target"]) -> float:
    """Maximum tokens of a line by fairseq's *max_positions*: a number, a (source, target) pair, or None."""
    index = ("source", "target").index(side)
    limit = max_positions[index] if isinstance(max_positions, (tuple, list)) else max_positions
    return limit if isinstance(limit, (int, float)) else math.inf


def overlong_line_warning(line: int, length: int, limit: float, limited_by: str = "the model takes") -> str:
    """The warning for line number *line*, whose *length* in tokens exceeds *limit*."""
    return f"line {line} has {length} subwords, {limited_by} {limit:.0f}; its translation is left empty"


def fitting(rows: Sequence[Tensor], limit: float, first_line: int = 1) -> list[int]:
    """Indices of the *rows* of at most *limit* tokens; logs a warning for each other row.

    The first row is line number *first_line*.
    """
    for i, row in enumerate(rows):
        if row.numel() > limit:
            logger.warning(overlong_line_warning(first_line + i, row.numel(), limit))
    return [i for i, row in enumerate(rows) if row.numel() <= limit]


def empty_hypothesis(eos: int) -> dict[str, Any]:
    """The hypothesis for a line that is not translated: ``</s>`` with a score of -inf."""
    return {
        "tokens": torch.tensor([eos]),
        "score": torch.tensor(-math.inf),
        "attention": torch.empty(0),
        "alignment": torch.empty(0),
        "positional_scores": torch.tensor([-math.inf]),
    }


def in_order(translated: Sequence[Any], indices: Sequence[int], count: int, eos: int) -> list[Any]:
    """Hypotheses of *count* lines: *translated* at the indices *indices*, empty ones elsewhere.

    Raises:
        SurfaceFusionError: *translated* and *indices* differ in length.
    """
    if len(translated) != len(indices):
        raise SurfaceFusionError(
            f"the model returned {len(translated)} translations for {len(indices)} lines; translate fewer "
            "lines at once, or one by one"
        )
    results: list[Any] = [[empty_hypothesis(eos)] for _ in range(count)]
    for index, hypotheses in zip(indices, translated, strict=True):
        results[index] = hypotheses
    return results


def keep_order_of_lines(
    generate: Callable[..., Any],
    hub: Any,
    tokenized_sentences: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """fairseq's ``GeneratorHubInterface.generate``, which ``translate`` and ``sample`` call.

    A line that is too long for the model gets an empty hypothesis, and a warning with its number is logged.
    """
    if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
        return generate(hub, tokenized_sentences, *args, **kwargs)  # calls this for a list of one
    indices = fitting(tokenized_sentences, position_limit(hub.max_positions, "source"))
    rows = [tokenized_sentences[i] for i in indices]
    results = generate(hub, rows, *args, **kwargs) if rows else []
    return in_order(results, indices, len(tokenized_sentences), hub.tgt_dict.eos())


def raise_max_tokens(
    build_batches: Callable[..., Any], hub: Any, tokens: Any, *args: Any, **kwargs: Any
) -> Any:
    """fairseq's ``GeneratorHubInterface._build_batches``; raises ``max_tokens`` to the longest line."""
    settings = hub.cfg.dataset
    limit, longest = settings.max_tokens, max(row.numel() for row in tokens)
    if limit is None or longest <= limit:
        return build_batches(hub, tokens, *args, **kwargs)
    with replaced(settings, "max_tokens", longest):
        return build_batches(hub, tokens, *args, **kwargs)
