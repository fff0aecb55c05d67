"""JSON text from files, clients and models. An object that has a key twice is an error everywhere:
Python keeps the last value, other programs the first, so that nobody knows which one was meant."""

from __future__ import annotations

import base64
import json
import math
from collections import Counter
from collections.abc import Mapping
from typing import Any

_MAX_DEPTH = 100
"""Maximum nesting of a value. Deeper ones exhaust the stack of later readers."""


class RepeatedKeyError(ValueError):
    """An object of JSON text that has a key twice."""


def json_value(text: str) -> Any:
    """Parse JSON. Raises ValueError for invalid JSON, a key that an object has twice, nesting
    deeper than 100 levels, or an integer with more digits than Python converts."""
    too_deep = f"it is nested deeper than {_MAX_DEPTH} levels"
    try:
        value = _decoder.decode(text)
    except RecursionError:
        raise ValueError(too_deep) from None
    if text.count("[") + text.count("{") > _MAX_DEPTH and _deeper_than(value, _MAX_DEPTH):
        raise ValueError(too_deep)
    return value


def json_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return an object of JSON, as ``object_pairs_hook``. Raises RepeatedKeyError."""
    value = dict(pairs)
    if len(value) != len(pairs):
        key = Counter(key for key, _ in pairs).most_common(1)[0][0]
        raise RepeatedKeyError(f"an object has the key {key[:60]!r} twice")
    return value


def json_types(value: Any, *, finite: bool = False) -> Any:
    """Return a value of a data row with the types of JSON: bytes become text in base64, dates,
    times, decimals and other values their text. ``finite``: other numbers become None."""
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, float):
        return value if not finite or math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {str(key): json_types(item, finite=finite) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [json_types(item, finite=finite) for item in value]
    if isinstance(value, bytes):
        return base64.b64encode(value).decode()
    return str(value)


_decoder = json.JSONDecoder(object_pairs_hook=json_object)


def _deeper_than(value: Any, limit: int) -> bool:
    level = [value]
    for _ in range(limit + 1):
        inside = [
            v.values() if isinstance(v, dict) else v for v in level if isinstance(v, (dict, list))
        ]
        if not inside:
            return False
        level = [item for items in inside for item in items]
    return True
