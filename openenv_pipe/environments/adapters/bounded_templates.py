"""Jinja's sandbox with limits for memory, for templates that come with others' configurations.

Without limits, `{{ 9**(9**9) }}` computes for hours in one call, which not even Ctrl-C ends, and a
loop that doubles a text takes all memory. Every operation that makes a text or a list tells
beforehand how large that is, and a rendering has a budget for all of them together.
"""

import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from functools import wraps
from types import BuiltinMethodType, MethodType
from typing import Any

import jinja2
from jinja2 import nodes
from jinja2.sandbox import ImmutableSandboxedEnvironment
from jinja2.visitor import NodeTransformer

MAX_RANGE = 1_000_000  # numbers, of all calls of `range` in one rendering
MAX_TEXT = 10_000_000  # characters or elements of one value, and of a message
MAX_IN_ALL = 50_000_000  # characters and elements of all values that a rendering makes
MAX_BITS = 10_000  # of a whole number
MAX_DIGITS = 1000  # of a rounded number, and spaces of an indentation of JSON
NO_GLOBALS = frozenset({"lipsum"})  # makes any amount of random text
# Methods whose results have no simple limit.
NO_METHODS = frozenset({"encode", "maketrans", "to_bytes", "translate"})
PRINTF = re.compile(r"%(?:\(.*?\))?[-+ #0]*(\*|\d*)(?:\.(\*|\d*))?")
FORMAT_SPEC = re.compile(r":([^{}]*)([{}])")

_left: ContextVar[list[int]] = ContextVar("left of the budget")


class BoundedEnvironment(ImmutableSandboxedEnvironment):
    """Jinja's sandbox, with limits for numbers, texts, lists and the rendered text."""

    intercepted_binops = frozenset({"*", "**", "+", "%"})

    def __init__(self) -> None:
        super().__init__(undefined=jinja2.StrictUndefined, finalize=_measured)
        self.filters = {
            name: _bounded_filter(name, function)
            for name, function in {**self.filters, "part": _part}.items()
        }
        self.globals = {name: each for name, each in self.globals.items() if name not in NO_GLOBALS}

    def compiled(self, source: str) -> jinja2.Template:
        """Compile a template. Raises what Jinja raises, and RecursionError."""
        return self.from_string(_Rewriter().visit(self.parse(source)))

    def call_binop(self, context: Any, operator: str, left: Any, right: Any) -> Any:
        """Apply an operator. Raises ValueError if the result would be too large."""
        texts = (str, bytes, list, tuple)
        if operator in ("*", "**") and isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length()
            bits = bits * right if operator == "**" else bits + right.bit_length()
            if bits > MAX_BITS:
                raise ValueError(f"the result of {operator} has more than {MAX_BITS} bits")
        elif operator == "*":
            sequence, factor = (left, right) if isinstance(right, int) else (right, left)
            if isinstance(sequence, texts) and isinstance(factor, int):
                _take(len(sequence) * factor)
        elif operator == "+" and isinstance(left, texts) and isinstance(right, texts):
            _take(len(left) + len(right))
        elif operator == "%" and isinstance(left, str | bytes):
            _take(_printf_size(left, right))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Any, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805
        """Call a function or a method. Raises ValueError if its result would be too large."""
        owner = getattr(__obj, "__self__", None)
        if isinstance(__obj, BuiltinMethodType | MethodType) and isinstance(owner, str):
            if __obj.__name__ == "join" and args:
                args = (_listed(args[0]), *args[1:])
            size = METHOD_SIZES.get(__obj.__name__, _same_size)
            _take(size(owner, *args, **kwargs))
        return super().call(__context, __obj, *args, **kwargs)

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        """Tell whether a template may read an attribute."""
        return attr not in NO_METHODS and super().is_safe_attribute(obj, attr, value)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """Return the bounded form of the methods `format` and `format_map` of texts."""
        function = super().wrap_str_format(value)
        if function is None:
            return None

        @wraps(function)
        def bounded(*args: Any, **kwargs: Any) -> str:
            _take(_format_size(value.__self__, args, kwargs))
            return function(*args, **kwargs)

        return bounded

    def concat(self, pieces: Iterable[str]) -> str:
        """Join the pieces of a rendered text. Raises ValueError if the text is too long."""
        kept: list[str] = []
        size = 0
        for piece in pieces:
            kept.append(piece)
            size += len(piece)
            if size > MAX_TEXT:
                raise ValueError(f"the text has more than {MAX_TEXT} characters")
        _take(size)
        return "".join(kept)


def render(template: jinja2.Template, fields: Mapping[str, Any]) -> str:
    """Render a template of a `BoundedEnvironment`.

    Raises:
        ValueError: It makes more than the limits allow.
        Exception: Whatever an expression of the template raises.
    """
    token = _left.set([MAX_IN_ALL])
    try:
        return template.render({"range": _Range(), **fields})
    finally:
        _left.reset(token)


class _Range:
    """The `range` of one rendering, also of loops within loops."""

    def __init__(self) -> None:
        self._left = MAX_RANGE

    def __call__(self, *bounds: int) -> range:
        """Return a range. Raises ValueError if this rendering has asked for too many numbers."""
        numbers = range(*bounds)
        self._left -= len(numbers)
        if self._left < 0:
            raise ValueError(f"its ranges have more than {MAX_RANGE} numbers")
        return numbers


class _Rewriter(NodeTransformer):
    """Writes `a ~ b` and `a[b:c]` as filters, because Jinja calls nothing for them."""

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)  # in place
        parts = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return _filter(parts, "join", [], node.lineno)

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:  # noqa: N802
        self.generic_visit(node)
        if not isinstance(node.arg, nodes.Slice):
            return node
        limits = (node.arg.start, node.arg.stop, node.arg.step)
        none = nodes.Const(None, lineno=node.lineno)
        return _filter(node.node, "part", [each or none for each in limits], node.lineno)


def _filter(value: nodes.Expr, name: str, args: list[nodes.Expr], lineno: int) -> nodes.Filter:
    return nodes.Filter(value, name, args, [], None, None, lineno=lineno)


def _take(size: int) -> None:
    """Take the size of a value from the budget. Raises ValueError if it is too large."""
    left = _left.get([MAX_TEXT])  # Jinja computes constants when it compiles
    left[0] -= max(size, 0)
    if size > MAX_TEXT:
        raise ValueError(f"a value has more than {MAX_TEXT} characters or elements")
    if left[0] < 0:
        raise ValueError(f"its values have more than {MAX_IN_ALL} characters and elements in all")


def _size(value: Any) -> int:
    """Return about how many characters the text of a value has at least. Raises ValueError."""
    size, waiting = 0, [value]
    while waiting:
        each = waiting.pop()
        if isinstance(each, str | bytes):
            size += len(each)
        elif isinstance(each, list | tuple | set | frozenset | Mapping):
            if len(each) + len(waiting) > MAX_TEXT:
                size = MAX_TEXT
            elif isinstance(each, Mapping):
                waiting.extend(each.values())
                waiting.extend(each)
            else:
                waiting.extend(each)
        size += 1
        if size > MAX_TEXT:
            raise ValueError(f"a value has more than {MAX_TEXT} characters or elements")
    return size


def _measured(value: Any) -> Any:
    """Return a value that is about to be written. Raises ValueError if its text is too long."""
    if not isinstance(value, str):
        _size(value)
    return value


def _bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter that takes the size of its result from the budget."""
    size = FILTER_SIZES.get(name, _same_size)
    place = 0 if getattr(function, "jinja_pass_arg", None) is None else 1  # of the value

    @wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        if name == "join":
            args = (*args[:place], _listed(args[place]), *args[place + 1 :])
        _take(size(*args[place:], **kwargs))
        return function(*args, **kwargs)

    return bounded


def _part(value: Any, start: Any, stop: Any, step: Any) -> Any:
    return value[start:stop:step]


def _listed(value: Any) -> Any:
    """Return what an iterator yields as a list, so that it can be measured and then used."""
    return list(value) if hasattr(value, "__next__") else value


# How large the result of a filter or method is at most. Its first argument is the value.


def _same_size(value: Any, *_: Any, **__: Any) -> int:
    return _size(value)


def _padded(value: Any, width: int = 80, *_: Any) -> int:
    return max(_size(value), width)


def _tabs(value: str, tabsize: int = 8) -> int:
    return len(value) + value.count("\t") * max(tabsize, 0)


def _joined(value: Any, d: Any = "", *_: Any, **__: Any) -> int:
    length = len(value) if hasattr(value, "__len__") else 0
    return _size(value) + length * _size(d)


def _joined_by(separator: str, value: Any) -> int:
    return _joined(value, separator)


def _replaced(value: Any, old: Any, new: Any, *_: Any, **__: Any) -> int:
    size, old = _size(value), str(old)
    count = str(value).count(old)
    return size + count * _size(new)


def _indented(value: Any, width: Any = 4, *_: Any, **__: Any) -> int:
    step = width if isinstance(width, int) else _size(width)
    return _size(value) + (str(value).count("\n") + 1) * max(step, 0)


def _wrapped(
    value: Any, width: int = 79, _: bool = True, wrapstring: Any = "", *__: Any, **___: Any
) -> int:
    size = _size(value)
    return size + (size // max(width, 1) + str(value).count("\n") + 1) * _size(wrapstring or "\n")


def _rows(value: Any, number: int = 0, *_: Any, **named: Any) -> int:
    return max(_size(value), number, named.get("linecount", 0), named.get("slices", 0))


def _rounded(value: Any, precision: int = 0, *_: Any, **__: Any) -> int:
    return 0 if abs(precision) <= MAX_DIGITS else MAX_TEXT + 1


def _as_json(value: Any, indent: int | None = None) -> int:
    return _size(value) if (indent or 0) <= MAX_DIGITS else MAX_TEXT + 1


def _summed(value: Any, attribute: Any = None, start: Any = 0) -> int:
    return _size(value) if isinstance(start, int | float) else MAX_TEXT + 1


def _printf_size(text: str | bytes, given: Any) -> int:
    return _printf(text, *(given if isinstance(given, tuple) else (given,)))


def _printf(text: Any, *args: Any, **kwargs: Any) -> int:
    numbers = [each for pair in PRINTF.findall(str(text)) for each in pair if each]
    return _formatted(str(text), str(text).count("%"), numbers, [*args, *kwargs.values()])


def _format_size(text: str, args: Any, kwargs: Mapping[str, Any]) -> int:
    numbers: list[str] = []
    for spec, end in FORMAT_SPEC.findall(text):
        numbers += re.findall(r"\d+", spec) if end == "}" else ["*"]
    return _formatted(text, text.count("{"), numbers, [*args, *kwargs.values()])


def _formatted(text: str, num_fields: int, widths: list[str], given: list[Any]) -> int:
    """Return the size of a formatted text. widths: the numbers in its fields, or `*`."""
    if any(each == "*" or len(each) > len(str(MAX_TEXT)) for each in widths):
        return MAX_TEXT + 1
    largest = max(map(_size, given), default=0)
    return len(text) + sum(map(int, widths)) + num_fields * largest


FILTER_SIZES: dict[str, Callable[..., int]] = {
    "batch": _rows,
    "center": _padded,
    "format": _printf,
    "indent": _indented,
    "join": _joined,
    "replace": _replaced,
    "round": _rounded,
    "slice": _rows,
    "sum": _summed,
    "tojson": _as_json,
    "wordwrap": _wrapped,
}
METHOD_SIZES: dict[str, Callable[..., int]] = {
    **dict.fromkeys(("center", "ljust", "rjust", "zfill"), _padded),
    "expandtabs": _tabs,
    "join": _joined_by,
    "replace": _replaced,
}
