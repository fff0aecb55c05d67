"""Text of tool results. The same result always has the same text: it becomes part of a prompt.

    text                                 as it is
    None, bool, int, float, dict         JSON
    list, tuple, range, deque, views     JSON list
    set, frozenset                       JSON list, sorted
    bytes, bytearray, memoryview         the text that they encode in UTF-8
    enum                                 its value
    dataclass, named tuple, pydantic     JSON object of its fields
    numpy array or scalar, tensor        JSON list or number
    an object whose class has a text     that text (date, path, Decimal, UUID, DataFrame, ...)

Everything else is an error of the tool: its text would be a memory address, which differs from run
to run. So are generators, and functions.
"""

from __future__ import annotations

import dataclasses
import enum
import inspect
import json
import re  # house: ok a linear pattern, over text of tools
from collections import deque
from collections.abc import ItemsView, KeysView, Mapping, MappingView, ValuesView
from collections.abc import Set as AnySet
from typing import Any

from burnish.errors import BurnishError

_ADDRESS = re.compile(r"\bat 0x[0-9a-fA-F]+")
_MAX_DEPTH = 100


class ToolResultError(BurnishError, TypeError):
    """A tool returned a value without a stable text. A mistake of the tool, not of the policy."""


def as_text(value: Any) -> str:
    """Return a result as text. Raises ToolResultError."""
    if isinstance(value, str) and not isinstance(value, enum.Enum):
        return _well_formed(str.__str__(value))
    try:
        simple = _simple(value, 0)
        text = simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)
    except ToolResultError:
        raise
    except Exception as error:  # raised by the user's object
        reason = f"{type(error).__name__}: {without_addresses(str(error))}"
        kind = type(value).__qualname__
        raise ToolResultError(
            f"the result, a {kind}, cannot be written as text ({reason})"
        ) from error
    return _well_formed(str.__str__(text))


def without_addresses(text: str) -> str:
    """Return the text of an error without the memory addresses of objects.

    >>> without_addresses("<function f at 0x7f12> is not callable")
    '<function f at 0x...> is not callable'
    """
    return _ADDRESS.sub("at 0x...", text)


def _well_formed(text: str) -> str:
    """Return text whose lone surrogates, which no encoding has, are U+FFFD."""
    return text.encode("utf-16-le", "surrogatepass").decode("utf-16-le", "replace")


def _simple(value: Any, depth: int) -> Any:
    """Return a value as JSON has it."""
    if depth > _MAX_DEPTH:
        raise ToolResultError(f"the result is nested deeper than {_MAX_DEPTH} levels")
    if isinstance(value, enum.Enum):
        return _simple(value.value, depth + 1)
    if value is None or isinstance(value, str | bool | int | float):
        return value
    if isinstance(value, bytes | bytearray | memoryview):
        return _decoded(bytes(value))
    if isinstance(value, Mapping):
        return {_key(key, depth): _simple(item, depth + 1) for key, item in value.items()}
    if isinstance(value, AnySet) and not isinstance(value, MappingView):
        return _sorted([_simple(item, depth + 1) for item in value])
    fields = _fields(value)
    if fields is not None:
        return {name: _simple(item, depth + 1) for name, item in fields.items()}
    if isinstance(value, list | tuple | range | deque | KeysView | ValuesView | ItemsView):
        return [_simple(item, depth + 1) for item in value]
    if callable(getattr(value, "tolist", None)):  # house: ok an array of any package
        return _simple(value.tolist(), depth + 1)
    return _own_text(value)


def _fields(value: Any) -> Mapping[str, Any] | None:
    """Return the fields of a dataclass, a named tuple or a pydantic model; None for others."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        names = [field.name for field in dataclasses.fields(value)]
        return {name: getattr(value, name) for name in names}  # house: ok a user's object
    if isinstance(value, tuple) and callable(getattr(value, "_asdict", None)):  # house: ok as above
        return value._asdict()  # type: ignore[attr-defined, no-any-return]
    if callable(getattr(type(value), "model_dump", None)):  # house: ok a user's object
        return value.model_dump(mode="json")  # type: ignore[no-any-return]
    return None


def _key(key: Any, depth: int) -> str:
    """Return a key of a mapping as text. JSON has no others."""
    simple = _simple(key, depth + 1)
    return simple if isinstance(simple, str) else json.dumps(simple, ensure_ascii=False)


def _sorted(items: list[Any]) -> list[Any]:
    """Return items in an order that does not depend on their hashes."""
    is_number = all(isinstance(item, int | float) for item in items)
    if is_number or all(isinstance(item, str) for item in items):
        return sorted(items)
    return sorted(items, key=lambda item: json.dumps(item, sort_keys=True))


def _decoded(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError as error:
        raise ToolResultError(
            f"the result has {len(data)} bytes that are not UTF-8 text ({error.reason} at "
            f"{error.start}); return text"
        ) from error


def _own_text(value: Any) -> str:
    """Return the text that the class of an object defines."""
    kind = type(value)
    description = f"the result is a {kind.__module__}.{kind.__qualname__}"
    if inspect.isgenerator(value) or inspect.isasyncgen(value):
        raise ToolResultError(f"{description}; return a list of its items instead of yielding them")
    if kind.__str__ is object.__str__ and kind.__repr__ is object.__repr__:
        raise ToolResultError(
            f"{description}, which has no text but its memory address; return text, or define "
            "__str__"
        )
    text = str(value)
    if _ADDRESS.search(text):
        raise ToolResultError(f"{description}, whose text contains a memory address; return text")
    return text
