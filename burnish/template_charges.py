"""The work of a chat template's expressions, charged to the budget of a rendering.

Every operation whose time or result can be larger than one step is charged before it is computed:
filters and tests through :func:`charged_filter` and :func:`charged_test`, texts and containers that
are written out through :func:`spend_for`.
"""

from __future__ import annotations

import re
from collections.abc import (
    Callable,
    Generator,
    ItemsView,
    Iterable,
    Iterator,
    KeysView,
    Mapping,
    Sequence,
    Sized,
    ValuesView,
)
from contextvars import ContextVar
from functools import wraps
from inspect import signature
from itertools import chain, count
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.utils import Namespace

from burnish.errors import BurnishError

STEP = 20
"""Cost of a loop iteration, and of a value in a container."""
MAX_BITS = 1 << 14
"""Size of the largest factors of a product of integers."""
_NUMBER, _PARENTHESIS = re.compile(r"\d+"), re.compile(r"[()]")
_SPEC = re.compile(r"[-#0 +]*(\d+|\*|)(?:\.(\d+|\*|))?")

_SIZED = (str, bytes, list, tuple, dict)
_CONTAINERS = (list, tuple, set, frozenset, KeysView, ValuesView, ItemsView)
_MATERIAL = (str, list, tuple, dict)

left_of_budget: ContextVar[list[int] | None] = ContextVar("left_of_budget", default=None)
"""Remaining budget of the rendering in progress, in a list of one; None: no budget."""


class TemplateLimitError(BurnishError, TemplateRuntimeError):
    """A template exceeds the limits on size, time or memory."""


def spend(amount: int) -> None:
    """Charge ``amount``. Raises TemplateLimitError if the budget does not suffice."""
    left = left_of_budget.get()
    if left is None:
        return
    left[0] -= amount
    if left[0] < 0:
        raise TemplateLimitError(
            "it exceeds the limits on steps or characters, which no conversation needs"
        )


def spend_for(value: Any, *, times: int = 1) -> None:
    """Charge for ``value`` as it is written out: each character costs 1, each value in it
    :data:`STEP`, and each container in it five times as much. A container that occurs twice counts
    twice, as it would in the text."""
    left = left_of_budget.get()
    if left is None:
        return
    if isinstance(value, str):
        spend(len(value) * times)
        return
    times = max(times, 1)
    limit, total = left[0] // times, 0
    stack = [value]
    while stack and total <= limit:
        part = stack.pop()
        kind = type(part)
        if kind is str:
            total += STEP + len(part)
        elif kind is dict:
            total += 5 * STEP
            stack += part.values()
            stack += part
        elif isinstance(part, _CONTAINERS):
            total += 5 * STEP
            stack += part
        else:
            total += STEP
            if isinstance(part, str | bytes):
                total += len(part)
            elif isinstance(part, Mapping):
                stack += [*part.values(), *part]
            elif isinstance(part, Namespace):
                stack.append(object.__getattribute__(part, "_Namespace__attrs"))
    spend(total * times)


def counted(iterable: Any, cost: int) -> Any:
    """Wrap the iterable of a loop, so that every iteration is charged ``cost``."""
    return iterable if left_of_budget.get() is None else _Counted(iterable, cost)


class _Counted:
    """The items of a loop. Each iteration is charged."""

    def __init__(self, iterable: Any, cost: int) -> None:
        self._iterable, self._cost = iterable, cost

    def __iter__(self) -> Iterator[Any]:
        for item in self._iterable:
            spend(self._cost)
            yield item

    def __len__(self) -> int:
        return len(self._iterable)


def size(value: Any) -> int:
    """Return the number of characters of a text, entries of a container or digits of a number."""
    if isinstance(value, int):
        return value.bit_length() // 3
    return len(value) if isinstance(value, _SIZED) else 1


def check_product(left: Any, right: Any) -> None:
    """Raise TemplateLimitError if two integers are too large to be multiplied in one step."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    if left.bit_length() + right.bit_length() > MAX_BITS:
        raise TemplateLimitError(f"a number has more than {MAX_BITS // 3} digits")


def check_power(left: Any, right: Any) -> None:
    """Raise TemplateLimitError if the power of two integers is too large."""
    if not (isinstance(left, int) and isinstance(right, int)) or abs(left) < 2:
        return
    if left.bit_length() * right > MAX_BITS:
        raise TemplateLimitError(f"a number has more than {MAX_BITS // 3} digits")


def spend_for_format(text: str, arguments: Sequence[Any]) -> None:
    """Charge for ``text % arguments``: every field may write all arguments, in its width."""
    spend(len(text))
    for argument in arguments:
        spend_for(argument, times=max(1, text.count("%")))
    is_given = False
    for width in _widths(text):
        is_given |= width == "*"
        spend(_number(width))
    for argument in arguments if is_given else ():
        for value in argument if isinstance(argument, tuple) else (argument,):
            spend(abs(int(value)) if isinstance(value, int) else 0)


def spend_for_field(value: Any, spec: str) -> None:
    """Charge for one field of ``str.format``."""
    spend_for(value)
    for width in _NUMBER.findall(spec):
        spend(_number(width))


def _number(digits: str) -> int:
    return int(digits[:10]) if digits.isdecimal() else 0


def _widths(text: str) -> Iterator[str]:
    """Yield the widths and precisions in a ``%`` format: digits, an asterisk or nothing."""
    position = 0
    while (position := text.find("%", position) + 1) > 0:
        if text.startswith("(", position):  # the key of a mapping, in which parentheses are paired
            depth = 0
            for parenthesis in _PARENTHESIS.finditer(text, position):
                depth += 1 if parenthesis[0] == "(" else -1
                if depth == 0:
                    position = parenthesis.end()
                    break
            else:
                return  # the format is invalid
        spec = _SPEC.match(text, position)
        assert spec is not None  # it matches an empty text
        yield from (spec[1], spec[2] or "")
        position = spec.end() + (text[spec.end() : spec.end() + 1] == "%")


def spend_for_replace(text: Any, old: Any, new: Any) -> None:
    """Charge for ``text.replace(old, new)``."""
    if isinstance(text, str):
        old, new = str(old), str(new)
    spend(len(text) + text.count(old) * len(new))


def spend_for_indent(text: str, width: Any) -> None:
    """Charge for an indent of the lines of ``text`` by a number or a text."""
    spend(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else size(width)))


Given = Mapping[str | int, Any]
"""Arguments of a filter by name; those of ``*args`` by position."""


def _passed(value: Any, given: Given) -> Any:
    """Charge for a filter that neither reads all items of a value nor writes it."""
    spend(STEP)
    return value


def _iterated(value: Any, given: Given) -> Any:
    """Charge for a filter that reads the items of a value, but not what is inside them. The items
    of an iterator are charged where they are made."""
    spend(STEP * (1 + _length(value)))
    return value


def _divided(value: Any, given: Given) -> Any:
    """Charge for ``batch`` and ``slice``, which can make as many items as a number says."""
    spend(STEP * sum(int(n) for n in given.values() if isinstance(n, int | float)))
    return _iterated(value, given)


def _joined(value: Any, given: Given) -> Any:
    """Charge for the texts of all items, and for the text between them."""
    separator = given.get("d", "")
    spend_for(separator)
    if isinstance(value, Iterator):
        return _metered(value, lambda item, _: spend_for([item, separator]))
    spend_for(value)
    spend_for(separator, times=_length(value))
    return value


def _compared(value: Any, given: Given) -> Any:
    """Charge for comparisons of all items."""
    for argument in given.values():
        spend_for(argument)
    if isinstance(value, Iterator):
        return _metered(value, lambda item, number: spend_for(item, times=number.bit_length()))
    spend_for(value, times=_length(value).bit_length())
    return value


def _summed(value: Any, given: Given) -> Any:
    """Charge for a sum. One of containers is copied with every item."""
    start = given.get("start", 0)
    if isinstance(start, int | float) or not isinstance(value, Iterable):
        return _iterated(value, given)
    if given.get("attribute") is not None:
        raise TemplateLimitError("the filter sum may only add numbers of an attribute")
    sizes = [size(start)]

    def grow(item: Any, _: int) -> None:
        sizes[0] += size(item)
        spend(STEP + sizes[0])

    return _metered(value, grow)


def _written(value: Any, given: Given) -> Any:
    """Charge for a filter that writes a value as text."""
    spend_for(value)
    for argument in given.values():
        spend_for(argument)
    return value


def _replaced(value: Any, given: Given) -> Any:
    _written(value, given)
    spend_for_replace(str(value), given.get("old", ""), given.get("new", ""))
    return value


def _indented(value: Any, given: Given) -> Any:
    _written(value, given)
    spend_for_indent(str(value), given.get("width", 4))
    return value


def _centered(value: Any, given: Given) -> Any:
    width = given.get("width", 80)
    spend(int(width) if isinstance(width, int | float) else 0)
    return _written(value, given)


def _formatted(value: Any, given: Given) -> Any:
    spend_for(value)
    spend_for_format(str(value), list(given.values()))
    return value


def _rounded(value: Any, given: Given) -> Any:
    precision = given.get("precision", 0)
    check_power(10, abs(precision) if isinstance(precision, int) else 0)
    return _passed(value, given)


def _wrapped(value: Any, given: Given) -> Any:
    """Charge for lines of text. The time of a word is quadratic in its length."""
    _written(value, given)
    longest = max(map(len, str(value).split()), default=0)
    separator = str(given.get("wrapstring") or "")
    spend(longest**2 + (len(str(value)) + 1) * len(separator))
    return value


def _stripped(value: Any, given: Given) -> Any:
    """Charge for the removal of tags, each of which copies the text."""
    _written(value, given)
    text = str(value)
    spend(len(text) * text.count("<"))
    return value


def _pretty(value: Any, given: Given) -> Any:
    """Charge for ``pprint``, which writes each container once for each one around it."""
    spend_for(value)
    spend_for(value, times=_depth(value))
    return value


def _json(value: Any, given: Given) -> Any:
    _written(value, given)
    if given:
        _spend_for_json(value, list(given.values()))
    return value


_CHARGES: dict[str, Callable[[Any, Given], Any]] = {
    **dict.fromkeys(
        ["abs", "attr", "count", "d", "default", "filesizeformat", "first", "float", "int", "last",
         "length"], _passed
    ),
    **dict.fromkeys(
        ["items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"],
        _iterated,
    ),
    **dict.fromkeys(["batch", "slice"], _divided),
    "join": _joined,
    **dict.fromkeys(["dictsort", "groupby", "max", "min", "sort", "unique"], _compared),
    "sum": _summed,
    **dict.fromkeys(
        ["capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "title", "trim",
         "truncate", "upper", "urlencode", "wordcount", "xmlattr"], _written
    ),
    "pprint": _pretty,
    "striptags": _stripped,
    "wordwrap": _wrapped,
    "replace": _replaced,
    "indent": _indented,
    "center": _centered,
    "format": _formatted,
    "round": _rounded,
    "tojson": _json,
}  # fmt: skip
"""Filter of Jinja -> function that charges for it in advance. It returns the value to filter: the
value itself, or an iterator whose items are charged when they are read."""
_LAZY = frozenset(
    {
        "batch", "items", "map", "reject", "rejectattr", "select", "selectattr", "slice", "unique"
    }
)  # fmt: skip
"""Filters that return a generator."""


def charged_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter ``function`` with its work charged to the budget of a rendering, if there
    is one. It gets the value as it is, so that its result is that of ``function``. Filters without
    an entry in the table of charges are refused."""
    # context or environment
    skipped = 1 if getattr(function, "jinja_pass_arg", None) else 0  # house: ok Jinja's mark
    charge, is_lazy = _CHARGES.get(name), name in _LAZY
    is_plain = charge not in (_stripped, _wrapped)  # linear in the length of a text
    parameters = list(signature(function).parameters.values())[skipped + 1 :]
    names: list[str | int] = [p.name for p in parameters if p.kind is not p.VAR_POSITIONAL]

    @wraps(function)
    def charged(*arguments: Any, **named: Any) -> Any:
        left = left_of_budget.get()
        if left is None:
            return function(*arguments, **named)
        if charge is None:
            raise TemplateLimitError(f"the filter {name} is not allowed in a chat template")
        value, rest = arguments[skipped], arguments[skipped + 1 :]
        is_alone = not rest and not named
        if is_plain and is_alone and type(value) is str:  # most filters of most templates
            left[0] -= 2 * len(value)
            if left[0] < 0:
                spend(0)
            result = function(*arguments)
        elif charge is _passed:  # without the arguments, which it does not read
            left[0] -= STEP
            result = function(*arguments, **named)
        else:
            given = dict(zip(chain(names, count()), rest, strict=False)) | named
            value = charge(value, given)
            result = function(*arguments[:skipped], value, *rest, **named)
        if isinstance(result, _MATERIAL):
            left[0] -= len(result)
        elif is_lazy:
            items: Any = _metered(result, lambda *_: spend(STEP))
            items.__qualname__ = result.__qualname__  # for a template that writes it
            return items
        return result

    return charged


def _metered(items: Iterable[Any], charge: Callable[[Any, int], None]) -> Generator[Any]:
    """Return the items of an iterator; ``charge`` gets each one and its number, from 1, before it
    is returned."""
    for number, item in enumerate(items, 1):
        charge(item, number)
        yield item


def _length(value: Any) -> int:
    """Return the number of items of a container. Those of an iterator are not counted: reading its
    length could read its items."""
    return len(value) if isinstance(value, Sized) and not isinstance(value, Iterator) else 0


def _spend_for_json(value: Any, given: Sequence[Any]) -> None:
    """Charge for the layout of JSON: each value begins a line with an indent, at a depth of at most
    Python's limit of recursion."""
    parts = [p for each in given for p in (each if isinstance(each, list | tuple) else [each])]
    largest = max((part if isinstance(part, int) else len(str(part)) for part in parts), default=0)
    spend_for(value, times=1 + largest * _depth(value) // STEP)


def _depth(value: Any) -> int:
    """Return the depth of nested containers."""
    depth, level = 0, [value]
    while level:
        depth += 1
        spend(len(level))
        inner: list[Any] = []
        for part in level:
            if isinstance(part, Mapping):
                inner += [
                    each for each in part.values() if isinstance(each, Mapping | list | tuple)
                ]
            elif isinstance(part, list | tuple):
                inner += [each for each in part if isinstance(each, Mapping | list | tuple)]
        level = inner
    return depth


def charged_test(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the test ``function`` with its work charged to the budget."""

    @wraps(function)
    def charged(*arguments: Any) -> Any:
        for value in arguments:
            if type(value) is not str or len(value) > STEP:
                spend_for(value)
        return function(*arguments)

    return charged


CHARGED_TESTS = (
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan",
    "<=", "le", "in", "lower", "upper", "filter", "test",
)  # fmt: skip
"""Tests of Jinja that compare values, write them as text or hash them."""
