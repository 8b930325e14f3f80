"""Warn about a ``--remove-bpe`` that does not match the subwords of the data."""

import argparse
import contextlib
import sys
from collections.abc import Iterator, Sequence
from typing import Any

from fairseq import tasks

from surface_fusion.compat.patching import replaced
from surface_fusion.data.subwords import subword_marks

SYNONYMS = {"subword_nmt": "@@ ", "@@": "@@ "}  # values of --remove-bpe


def hint(argv: Sequence[str], dictionary: Any) -> str | None:
    """Return a warning if ``--remove-bpe`` in *argv* does not match *dictionary*, else None."""
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


@contextlib.contextmanager
def subword_hint(verb: str, argv: Sequence[str]) -> Iterator[None]:
    """Inside the block, print the :func:`hint` when fairseq's ``setup_task`` has loaded the dictionary."""
    fairseqs_setup_task = tasks.setup_task

    def setup_task(*args: Any, **kwargs: Any) -> Any:
        task = fairseqs_setup_task(*args, **kwargs)
        if (line := hint(argv, task.target_dictionary)) is not None:
            print(f"surface-fusion {verb}: warning: {line}", file=sys.stderr)
        return task

    with replaced(tasks, "setup_task", setup_task):
        yield
