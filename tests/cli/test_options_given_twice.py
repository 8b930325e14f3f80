"""An option with one value is refused if it is given twice with different values.

Tests ``cli/user_errors.py``.
"""

import pytest


@pytest.mark.parametrize(
    "argv, words",
    [
        (("score", "--hyp", "a", "--hyp", "b", "--ref", "c"), "--hyp is given twice, a and b; give it once"),
        (("score", "--hyp", "a", "--ref", "c", "--lang", "ro", "--lang", "de"), "--lang is given twice"),
        (("average", "x", "-o", "a", "y", "--output", "b"), "--output is given twice, a and b"),
        (("average", "--last", "2", "a", "--last", "3", "a", "-o", "b"), "--last is given twice"),
        (("translate", "a", "--beam", "4", "--beam", "5"), "--beam is given twice, 4 and 5"),
        (("translate", "a", "--checkpoint", "b", "--checkpoint", "c"), "--checkpoint is given twice"),
        (("analyse", "all", "a", "b", "-o", "c", "-o", "d"), "-o is given twice, c and d"),
        (("generate", "a", "--path", "b", "--user-dir", "c", "--user-dir", "d"), "--user-dir is given twice"),
    ],
)
def test_a_second_different_value_is_refused(command, argv, words):
    result = command(*argv)
    assert (result.status, result.out) == (2, "")
    assert words in result.err and result.err.count("\n") == 1


def test_the_same_value_twice_is_accepted(command, tmp_path):
    """What is wrong then is the missing file."""
    result = command("score", "--hyp", "a", "--hyp", "a", "--ref", "b", "--ref", "b")
    assert result.status == 2 and "No such file or directory" in result.err
