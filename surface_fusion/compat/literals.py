"""fairseq evaluates texts of configurations and data files as Python code; they are parsed as literals.

A checkpoint, a YAML configuration or a line of a data file that holds
``__import__("os").system("...")`` where fairseq expects ``(0.9, 0.98)`` runs that command in plain fairseq.
"""

import ast
import importlib
from typing import Any

from surface_fusion.errors import SurfaceFusionError

MODULES = (
    "fairseq.utils",  # eval_str_list, eval_str_dict, eval_bool
    "fairseq.criterions.ctc",
    "fairseq.data.audio.raw_audio_dataset",
    "fairseq.data.codedataset",  # each line of a data file
    "fairseq.models.fconv",
    "fairseq.models.fconv_lm",
    "fairseq.models.fconv_self_att",
    "fairseq.models.hubert.hubert",
    "fairseq.models.lightconv_lm",
    "fairseq.models.multires_hubert.multires_hubert",
    "fairseq.models.speech_to_text.s2t_wav_transformer",
    "fairseq.models.transformer_lm",
    "fairseq.models.wav2vec.wav2vec",
    "fairseq.models.wav2vec.wav2vec2",
    "fairseq.optim.adafactor",
    "fairseq.optim.adam",
    "fairseq.optim.adamax",
    "fairseq.optim.cpu_adam",
    "fairseq.optim.fused_lamb",
)
"""The modules that call ``eval`` on what a file may hold. ``import fairseq.tasks`` imports them all."""

LONGEST = 1_000_000
"""Characters; a line of an audio data set holds thousands of units."""

MOST_ITEMS = 10_000
"""Items that ``+`` and ``*`` may make: ``[(512, 3)] * 20`` is short for 60 numbers."""

MOST_OPERATIONS = 100
"""Of ``+``, ``-``, ``*`` and ``/`` in one text; each may copy ``MOST_ITEMS`` items."""

LARGEST = 2**63
"""Bound of the numbers that ``+``, ``-``, ``*`` and ``/`` may make."""


def parse_literals() -> None:
    """Let each of ``MODULES`` call :func:`literal` by the name ``eval``."""
    for name in MODULES:
        vars(importlib.import_module(name))["eval"] = literal


def literal(text: str) -> Any:
    """The value of *text*, a Python literal.

    Literals are numbers, strings, booleans, ``None``, and lists, tuples, dictionaries and sets of literals;
    also ``+`` and ``*`` of lists, tuples and numbers, as in ``[(512, 3)] * 9 + [(1024, 3)]``, and ``-`` and
    ``/`` of numbers. Nothing is called and no name is looked up.

    Raises:
        NoLiteralError: *text* holds anything else, or takes more than ``MOST_ITEMS`` items or
            ``MOST_OPERATIONS`` operations.
        TypeError: *text* is not a string, as ``eval`` does.
    """
    if not isinstance(text, str):
        raise TypeError(f"literal() takes a string, not {type(text).__name__}")
    if len(text) > LONGEST:
        raise NoLiteralError(text, f"longer than {LONGEST} characters")
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if sum(isinstance(node, ast.BinOp) for node in ast.walk(tree)) > MOST_OPERATIONS:
            raise _NoLiteral(f"more than {MOST_OPERATIONS} operations")
        return _value(tree.body)
    except _NoLiteral as reason:
        raise NoLiteralError(text, str(reason)) from None
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise NoLiteralError(text, type(error).__name__) from None


class NoLiteralError(SurfaceFusionError):
    """A text that :func:`literal` refuses.

    Attributes:
        shown: the text in quotes, shortened.
        reason: such as ``it calls open``.
    """

    def __init__(self, text: str, reason: str) -> None:
        """Keep both and say what to write instead."""
        self.shown = repr(text if len(text) <= 100 else f"{text[:100]} ...")
        self.reason = reason
        super().__init__(
            f"{self.shown} is no literal ({reason}) and is not evaluated; write it as a number, string, "
            "list, tuple or dictionary"
        )


class _NoLiteral(Exception):
    """Names what a literal may not hold."""


def _value(node: ast.expr) -> Any:
    if isinstance(node, ast.Constant):
        return node.value
    if isinstance(node, ast.List):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Tuple):
        return tuple(_value(item) for item in node.elts)
    if isinstance(node, ast.Set):
        return {_value(item) for item in node.elts}
    if isinstance(node, ast.Dict):
        if None in node.keys:
            raise _NoLiteral("it unpacks a dictionary")
        keys = [_value(key) for key in node.keys if key is not None]
        return dict(zip(keys, map(_value, node.values), strict=True))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, (ast.UAdd, ast.USub)):
        number = _value(node.operand)
        if not _is_number(number):
            raise _NoLiteral("it negates what is no number")
        return -number if isinstance(node.op, ast.USub) else number
    if isinstance(node, ast.BinOp):
        return _computed(node.op, _value(node.left), _value(node.right))
    raise _NoLiteral(_described(node))


def _computed(op: ast.operator, left: Any, right: Any) -> Any:
    if _is_number(left) and _is_number(right):
        return _computed_number(op, left, right)
    if isinstance(op, ast.Add) and type(left) is type(right) and isinstance(left, (list, tuple)):
        _check_items(_items(left) + _items(right))
        return left + right
    if isinstance(op, ast.Mult):
        sequence, times = (right, left) if isinstance(left, int) else (left, right)
        if isinstance(sequence, (list, tuple)) and type(times) is int:
            _check_items(max(len(sequence), _items(sequence)) * times)
            return sequence * times
    raise _NoLiteral(f"{type(op).__name__} of {type(left).__name__} and {type(right).__name__}")


def _computed_number(op: ast.operator, left: Any, right: Any) -> Any:
    if isinstance(op, ast.Add):
        number = left + right
    elif isinstance(op, ast.Sub):
        number = left - right
    elif isinstance(op, ast.Mult):
        number = left * right
    elif isinstance(op, ast.Div):
        number = left / right
    else:
        raise _NoLiteral(f"{type(op).__name__} of numbers")
    if abs(number) >= LARGEST:
        raise _NoLiteral("a number of more than 63 bits")
    return number


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float, complex)) and not isinstance(value, bool)


def _items(value: Any) -> int:
    """How many items *value* holds, itself counted."""
    if isinstance(value, dict):
        return 1 + sum(_items(key) + _items(item) for key, item in value.items())
    if isinstance(value, (list, tuple, set)):
        return 1 + sum(map(_items, value))
    return 1


def _check_items(count: int) -> None:
    if count > MOST_ITEMS:
        raise _NoLiteral(f"more than {MOST_ITEMS} items")


def _described(node: ast.expr) -> str:
    if isinstance(node, ast.Call):
        return f"it calls {_shortened(ast.unparse(node.func))}"
    if isinstance(node, ast.Name):
        return f"it names {_shortened(node.id)}"
    return f"it holds {type(node).__name__}"


def _shortened(text: str) -> str:
    return text if len(text) <= 40 else f"{text[:40]} ..."
