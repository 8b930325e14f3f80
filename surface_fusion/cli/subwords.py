"""Warn about a ``--remove-bpe`` that does not match the subwords of the data."""

import argparse
import sys
from collections.abc import Callable, Sequence
from typing import Any

# Other values of --remove-bpe with the meaning of "@@ ".
SYNONYMS = {"subword_nmt": "@@ ", "@@": "@@ "}


def hint(argv: Sequence[str], dictionary: Any) -> str | None:
    """Return a warning if ``--remove-bpe`` in *argv* does not match *dictionary*, else None."""
    from surface_fusion.analysis.ablation import subword_marks

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--remove-bpe", "--post-process", nargs="?", const="@@ ", dest="symbol")
    parser.add_argument("--bpe")
    flags = parser.parse_known_args(argv)[0]
    if flags.symbol is None:
        return None
    symbol, marks = SYNONYMS.get(flags.symbol, flags.symbol), subword_marks(dictionary)
    if symbol == flags.bpe == "sentencepiece":
        return (
            "--remove-bpe and --bpe both join pieces, so D- lines lose their spaces; leave --remove-bpe out"
        )
    if symbol == "@@ " and marks == "sentencepiece":
        joined = flags.bpe == "sentencepiece"
        advice = "leave it out, as --bpe joins them" if joined else "give --remove-bpe sentencepiece"
        return (
            "--remove-bpe without a value joins subwords that end in @@, but the dictionary has "
            f"sentencepiece pieces (\u2581); {advice}"
        )
    if symbol == "sentencepiece" and marks != symbol:
        advice = "give --remove-bpe without a value" if marks else "leave it out"
        return (
            "--remove-bpe sentencepiece removes every space, because the dictionary has no sentencepiece "
            f"pieces (\u2581); {advice}"
        )
    return None


def with_hint(set_up: Callable[..., Any], verb: str, argv: Sequence[str]) -> Callable[..., Any]:
    """Wrap fairseq's ``setup_task``, which loads the dictionary, to print the :func:`hint` on stderr."""

    def set_up_task(*args: Any, **kwargs: Any) -> Any:
        task = set_up(*args, **kwargs)
        if (line := hint(argv, task.target_dictionary)) is not None:
            print(f"surface-fusion {verb}: warning: {line}", file=sys.stderr)
        return task

    return set_up_task
