"""Return one result per input line, in input order. ``interactive.py`` uses these functions, too."""

import logging
import math
from collections.abc import Sequence
from typing import Any, Literal

import torch
from torch import Tensor

from surface_fusion.compat.patching import Original, repair, replaced
from surface_fusion.errors import SurfaceFusionError

logger = logging.getLogger(__name__)


def position_limit(max_positions: Any, side: Literal["source", "target"]) -> float:
    """Maximum tokens of a line by fairseq's *max_positions*: a number, a (source, target) pair, or None."""
    if isinstance(max_positions, (tuple, list)):
        max_positions = max_positions[side == "target"]
    return max_positions if isinstance(max_positions, (int, float)) else math.inf


LEFT_EMPTY = "its translation is left empty"


def warn_of_overlong_line(
    line: int,
    length: int,
    limit: float,
    limited_by: str = "the model takes",
    result: str = LEFT_EMPTY,
) -> None:
    """Log that line number *line*, whose *length* in tokens exceeds *limit*, is not translated."""
    logger.warning(f"line {line} has {length} subwords, {limited_by} {limit:.0f}; {result}")


def fitting(rows: Sequence[Tensor], limit: float, first_line: int = 1, result: str = LEFT_EMPTY) -> list[int]:
    """Indices of the *rows* of at most *limit* tokens; logs a warning with its *result* for each other row.

    The first row is line number *first_line*.
    """
    for i, row in enumerate(rows):
        if row.numel() > limit:
            warn_of_overlong_line(first_line + i, row.numel(), limit, result=result)
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
    results = dict(zip(indices, translated, strict=True))
    return [results[i] if i in results else [empty_hypothesis(eos)] for i in range(count)]


@repair("fairseq.hub_utils.GeneratorHubInterface.generate", probe="hub_drops_long_line")
def keep_order_of_lines(
    generate: Original,
    hub: Any,
    tokenized_sentences: Any,
    *args: Any,
    **kwargs: Any,
) -> Any:
    """Return an empty result for a line that is too long; the hub drops it, which shifts all later results.

    A warning with the number of the line is logged.
    """
    if torch.is_tensor(tokenized_sentences) and tokenized_sentences.dim() == 1:
        return generate(hub, tokenized_sentences, *args, **kwargs)  # calls this for a list of one
    indices = fitting(tokenized_sentences, position_limit(hub.max_positions, "source"))
    rows = [tokenized_sentences[i] for i in indices]
    results = generate(hub, rows, *args, **kwargs) if rows else []
    return in_order(results, indices, len(tokenized_sentences), hub.tgt_dict.eos())


@repair("fairseq.hub_utils.GeneratorHubInterface._build_batches", probe="hub_is_limited_by_training")
def raise_max_tokens(build_batches: Original, hub: Any, tokens: Any, *args: Any, **kwargs: Any) -> Any:
    """Raise the ``--max-tokens`` of the training to the longest line, on which the hub would fail."""
    settings = hub.cfg.dataset
    limit, longest = settings.max_tokens, max(row.numel() for row in tokens)
    with replaced(settings, "max_tokens", None if limit is None else max(limit, longest)):
        return build_batches(hub, tokens, *args, **kwargs)
