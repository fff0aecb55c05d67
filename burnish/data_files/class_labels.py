"""Names of class labels. The library datasets stores a ``ClassLabel`` as the index of its name,
which says nothing: the label of ``pass`` is 0 if the names are ``[pass, fail]``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

Names = Mapping[str, Sequence[str]]
"""Column -> names of its classes."""
_KEY = b"huggingface"
"""Key of the schema's metadata with the features of ``datasets``."""
_LISTS = ("Sequence", "List", "LargeList")


def with_class_names(values: dict[str, Any], names: Names) -> dict[str, Any]:
    """Return the values of a row with the name of each class in place of its index. A missing label
    (-1) is None.

    >>> with_class_names({"label": 1, "labels": [0, -1]}, {"label": "ab", "labels": "ab"})
    {'label': 'b', 'labels': ['a', None]}
    """
    if not names:
        return values
    return values | {key: _named(values[key], names[key]) for key in names if key in values}


def _named(value: Any, names: Sequence[str]) -> Any:
    if isinstance(value, list | tuple):
        return [_named(each, names) for each in value]
    if not isinstance(value, int):
        return value
    return names[value] if 0 <= value < len(names) else None


def names_in_schema(metadata: Mapping[bytes, bytes] | None) -> Names:
    """Return the names in the metadata of a schema that ``datasets`` wrote."""
    text = (metadata or {}).get(_KEY)
    return {} if text is None else _parsed(text)


@lru_cache(maxsize=64)
def _parsed(text: bytes) -> Names:
    try:
        features = json.loads(text)["info"]["features"]
    except (ValueError, LookupError, TypeError, RecursionError):  # of another program
        return {}
    return names_in_features(features if isinstance(features, dict) else {})


def names_in_features(features: Mapping[str, Any]) -> Names:
    """Return the names in the features of ``datasets``, as ``Features.to_dict`` returns them."""
    return {key: names for key, value in features.items() if (names := _names(value))}


def _names(feature: Any) -> tuple[str, ...]:
    """Return the names of a label, or of a list of labels, in the form of JSON."""
    for _ in range(2):
        if isinstance(feature, list) and len(feature) == 1:
            feature = feature[0]
        elif isinstance(feature, dict) and feature.get("_type") in _LISTS:
            feature = feature.get("feature")
    if not isinstance(feature, dict) or feature.get("_type") != "ClassLabel":
        return ()
    names = feature.get("names")
    return tuple(map(str, names)) if isinstance(names, list) else ()
