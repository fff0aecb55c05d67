"""The work of a chat template's expressions, charged to the budget of a rendering.

Every operation whose time or result can be larger than one step is charged before it is computed:
filters and tests through :func:`charged_filter` and :func:`charged_test`, texts and containers that
are written out through :func:`spend_for`.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from functools import wraps
from typing import Any

from jinja2 import TemplateRuntimeError
from jinja2.utils import Namespace

from burnish.errors import BurnishError

STEP = 20
"""Cost of a loop iteration, and of a value in a container."""
MAX_WIDTH = 100_000
"""Largest number that may be passed to a filter or a string method (widths, repetitions)."""
MAX_INDENT = 16
"""Largest indent of ``tojson``."""
MAX_BITS = 1 << 14
"""Size of the largest factors of a product of integers."""
WIDE = re.compile(r"\*|\d{6,}")

_SIZED = (str, bytes, list, tuple, dict)
_CONTAINERS = (list, tuple, set, frozenset)
_MATERIAL = (str, list, tuple, dict)

left_of_budget: ContextVar[list[int] | None] = ContextVar("left_of_budget", default=None)
"""Remaining budget of the rendering in progress, in a list of one; None: no budget."""

FILTERS = frozenset(
    {
        "abs", "attr", "batch", "capitalize", "center", "count", "d", "default", "dictsort", "e",
        "escape", "filesizeformat", "first", "float", "forceescape", "format", "groupby", "indent",
        "int", "items", "join", "last", "length", "list", "lower", "map", "max", "min", "reject",
        "rejectattr", "replace", "reverse", "round", "safe", "select", "selectattr", "slice",
        "sort", "string", "sum", "title", "tojson", "trim", "truncate", "unique", "upper",
        "wordcount",
    }
)  # fmt: skip
"""Filters of Jinja that chat templates may use. The others have no use in one, or no bound."""
_COMPARING = frozenset({"min", "max", "sort", "unique", "dictsort", "groupby"})
_PASSING = frozenset(
    {
        "attr", "batch", "count", "d", "default", "first", "items", "last", "length", "list", "map",
        "reject", "rejectattr", "reverse", "select", "selectattr", "slice", "sum",
    }
)  # fmt: skip
"""Filters that do not read what is inside the values of a container. All others write it as
text."""


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
            if isinstance(part, str):
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


def check_numbers(name: str, values: Any) -> None:
    """Raise TemplateLimitError if a number is too large for an argument of ``name``."""
    for value in values:
        if isinstance(value, int | float) and abs(value) > MAX_WIDTH:
            raise TemplateLimitError(
                f"{name} has the argument {str(value)[:20]}, above {MAX_WIDTH}"
            )


def check_product(left: Any, right: Any) -> None:
    """Raise TemplateLimitError if two integers are too large to be multiplied in one step."""
    if not (isinstance(left, int) and isinstance(right, int)):
        return
    if left.bit_length() + right.bit_length() > MAX_BITS:
        raise TemplateLimitError(f"a product has more than {MAX_BITS // 3} digits")


def spend_for_format(text: str, mark: str, given: Sequence[Any]) -> None:
    """Charge for a format with ``given`` arguments, in which ``mark`` begins each field."""
    if WIDE.search(text):
        raise TemplateLimitError("the width of a format is too large")
    spend(len(text))
    for value in given:
        spend_for(value, times=max(1, text.count(mark)))


def spend_for_replace(text: str, old: Any, new: Any) -> None:
    """Charge for ``text.replace(old, new)``."""
    spend(len(text) + text.count(str(old)) * len(str(new)))


def spend_for_indent(text: str, width: Any) -> None:
    """Charge for an indent of the lines of ``text`` by a number or a text."""
    spend(len(text) + (text.count("\n") + 1) * (width if isinstance(width, int) else size(width)))


def charged_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return the filter ``function`` with its work charged to the budget of a rendering, if there
    is one. Names outside of :data:`FILTERS` are then refused."""
    # context or environment
    skipped = 1 if getattr(function, "jinja_pass_arg", None) else 0  # house: ok Jinja's mark

    allowed = name in FILTERS

    @wraps(function)
    def charged(*arguments: Any, **named: Any) -> Any:
        left = left_of_budget.get()
        if left is None:
            return function(*arguments, **named)
        if not allowed:
            raise TemplateLimitError(f"the filter {name} is not allowed in a chat template")
        value, rest = arguments[skipped], arguments[skipped + 1 :]
        if type(value) is str and not rest and not named:  # most filters of most templates
            left[0] -= 2 * len(value)
            if left[0] < 0:
                spend(0)
            result = function(*arguments)
        else:
            if not isinstance(value, _MATERIAL) and isinstance(value, Iterable):
                value = counted(value, STEP)  # a generator of another filter, or a range
                value = value if name in _PASSING else list(value)
            _spend_for_filter(name, value, rest, named)
            result = function(*arguments[:skipped], value, *rest, **named)
        if isinstance(result, _MATERIAL):
            left[0] -= len(result)
        elif isinstance(result, Iterator):
            return iter(counted(result, STEP))
        return result

    return charged


def _spend_for_filter(name: str, value: Any, rest: Sequence[Any], named: Mapping[str, Any]) -> None:
    spend(size(value))
    given = [*rest, *named.values()]
    if given:
        check_numbers(name, given)
    if name not in _PASSING and not isinstance(value, str):
        spend_for(value, times=size(value).bit_length() if name in _COMPARING else 1)
    if name == "tojson" and given:
        _spend_for_json(value, given)
    elif name == "format":
        spend_for_format(str(value), "%", given)
    elif name == "join" and given and isinstance(value, list | tuple | str):
        spend(len(value) * size(given[0]))
    elif name == "replace" and len(given) > 1:
        spend_for_replace(str(value), *given[:2])
    elif name == "indent":
        spend_for_indent(str(value), next(iter(given), 4))
    elif name == "sum" and any(not isinstance(each, int | float | str) for each in given):
        raise TemplateLimitError("the filter sum may only add numbers")
    elif name in ("center", "batch", "slice", "round"):
        spend(sum(int(each) for each in given if isinstance(each, int | float)))


def _spend_for_json(value: Any, given: Sequence[Any]) -> None:
    """Charge for the layout of JSON: each value begins a line with an indent, at a depth of at most
    Python's limit of recursion."""
    parts = [p for each in given for p in (each if isinstance(each, list | tuple) else [each])]
    largest = max((part if isinstance(part, int) else len(str(part)) for part in parts), default=0)
    if largest > MAX_INDENT:
        raise TemplateLimitError(f"tojson has an argument above {MAX_INDENT}")
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
    """Return the test ``function`` with the work of a comparison charged to the budget."""

    @wraps(function)
    def charged(*arguments: Any) -> Any:
        for value in arguments:
            if type(value) is not str or len(value) > STEP:
                spend_for(value)
        return function(*arguments)

    return charged


COMPARING_TESTS = (
    "==", "eq", "equalto", "!=", "ne", ">", "gt", "greaterthan", ">=", "ge", "<", "lt", "lessthan",
    "<=", "le", "in",
)  # fmt: skip
"""Tests of Jinja that compare values."""
