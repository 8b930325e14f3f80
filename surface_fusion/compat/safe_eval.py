"""Parse strings of configurations and data files as literals; fairseq evaluates them as Python code.

A checkpoint, a YAML configuration or a line of a data file that contains
``__import__("os").system("...")`` where fairseq expects ``(0.9, 0.98)`` runs that command in plain fairseq.
"""

import ast
import importlib.util
import operator
from typing import Any

from surface_fusion.compat.patching import Original, repair
from surface_fusion.errors import SurfaceFusionError, shorten


def _exists(module: str) -> bool:
    """Whether the installed build of fairseq has *module*; fairseq-fixed lacks some of ve-fairseq's."""
    try:
        return importlib.util.find_spec(module) is not None
    except ModuleNotFoundError:  # its package
        return False


_MODULES = (
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
MODULES = tuple(filter(_exists, _MODULES))
"""The modules that call ``eval`` on strings from files."""

LONGEST = 1_000_000
"""Maximum number of characters; a line of an audio data set has thousands of units."""

MOST_ITEMS = 10_000
"""Maximum number of items in a result of ``+`` or ``*``; ``[(512, 3)] * 20`` is a usual one."""

MOST_OPERATIONS = 100
"""Maximum number of ``+``, ``-``, ``*`` and ``/`` in one string; each may copy ``MOST_ITEMS`` items."""

LARGEST = 2**63
"""Results of ``+``, ``-``, ``*`` and ``/`` of numbers must have a smaller absolute value."""

ARITHMETIC: dict[type[ast.operator], Any] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
}
"""What is computed of numbers."""


@repair(*(f"{module}.eval" for module in MODULES), probe="text_is_evaluated")
def parse_literal(evaluate: Original, text: str) -> Any:
    """Parse text of checkpoints, configurations and data files as a literal; fairseq evaluates it as code."""
    return literal(text)


def literal(text: str) -> Any:
    """The value of *text*, a Python literal.

    Literals are numbers, strings, booleans, ``None``, and lists, tuples, dictionaries and sets of literals;
    also ``+`` and ``*`` of lists, tuples and numbers, as in ``[(512, 3)] * 9 + [(1024, 3)]``, and ``-`` and
    ``/`` of numbers. Nothing is called and no name is looked up.

    Raises:
        NotLiteralError: *text* contains anything else, or needs more than ``MOST_ITEMS`` items or
            ``MOST_OPERATIONS`` operations.
        TypeError: *text* is not a string, as ``eval`` does.
    """
    if not isinstance(text, str):
        raise TypeError(f"literal() takes a string, not {type(text).__name__}")
    if len(text) > LONGEST:
        raise NotLiteralError(f"longer than {LONGEST} characters", text)
    try:
        tree = ast.parse(text.strip(), mode="eval")
        if sum(isinstance(node, ast.BinOp) for node in ast.walk(tree)) > MOST_OPERATIONS:
            raise NotLiteralError(f"more than {MOST_OPERATIONS} operations")
        return _value(tree.body)
    except NotLiteralError as error:
        raise NotLiteralError(error.reason, text) from None
    except (ArithmeticError, MemoryError, RecursionError, SyntaxError, TypeError, ValueError) as error:
        raise NotLiteralError(type(error).__name__, text) from None


class NotLiteralError(SurfaceFusionError):
    """A string that :func:`literal` refuses.

    Attributes:
        shown: the string in quotes, shortened.
        reason: such as ``it calls open``.
    """

    def __init__(self, reason: str, text: str = "") -> None:
        """Set both attributes; the functions below raise without *text*, which :func:`literal` adds."""
        self.shown = repr(shorten(text, 100))
        self.reason = reason
        super().__init__(
            f"{self.shown} is not a literal ({reason}) and is not evaluated; write it as a number, string, "
            "list, tuple or dictionary"
        )


def _value(node: ast.AST | None) -> Any:
    match node:
        case ast.Constant(value):
            return value
        case ast.List(items):
            return [_value(item) for item in items]
        case ast.Tuple(items):
            return tuple(_value(item) for item in items)
        case ast.Set(items):
            return {_value(item) for item in items}
        case ast.Dict(keys, values):
            return dict(zip([*map(_value, keys)], map(_value, values), strict=True))
        case ast.UnaryOp(ast.UAdd() | ast.USub() as op, operand):
            if not _is_number(number := _value(operand)):
                raise NotLiteralError("it negates what is not a number")
            return -number if isinstance(op, ast.USub) else number
        case ast.BinOp(left, op, right):
            return _computed(op, _value(left), _value(right))
        case ast.Call(function):
            raise NotLiteralError(f"it calls {shorten(ast.unparse(function), 40)}")
        case ast.Name(name):
            raise NotLiteralError(f"it names {shorten(name, 40)}")
        case None:  # a key
            raise NotLiteralError("it unpacks a dictionary")
    raise NotLiteralError(f"it holds {type(node).__name__}")


def _computed(op: ast.operator, left: Any, right: Any) -> Any:
    if _is_number(left) and _is_number(right):
        if type(op) not in ARITHMETIC:
            raise NotLiteralError(f"{type(op).__name__} of numbers")
        number = ARITHMETIC[type(op)](left, right)
        if abs(number) >= LARGEST:
            raise NotLiteralError("a number of more than 63 bits")
        return number
    swapped = isinstance(op, ast.Mult) and isinstance(left, int)
    sequence, other = (right, left) if swapped else (left, right)
    added = isinstance(op, ast.Add) and type(left) is type(right)
    repeated = isinstance(op, ast.Mult) and type(other) is int
    if not isinstance(sequence, (list, tuple)) or not (added or repeated):
        raise NotLiteralError(f"{type(op).__name__} of {type(left).__name__} and {type(right).__name__}")
    if (_items(left) + _items(right) if added else _items(sequence) * other) > MOST_ITEMS:
        raise NotLiteralError(f"more than {MOST_ITEMS} items")
    return left + right if added else sequence * other


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _items(value: Any) -> int:
    """Number of items in *value* at all depths, including *value* itself."""
    if isinstance(value, dict):
        return 1 + sum(_items(key) + _items(item) for key, item in value.items())
    return 1 + sum(map(_items, value)) if isinstance(value, (list, tuple, set)) else 1
