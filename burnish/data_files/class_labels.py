"""Names of class labels. The library datasets stores a ``ClassLabel`` as the index of its name,
which says nothing: the label of ``pass`` is 0 if the names are ``[pass, fail]``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

Features = Mapping[str, Any]
"""Column -> feature in the form of ``Features.to_dict``; only columns that contain class labels."""
_KEY = b"huggingface"
"""Key of the schema's metadata with the features of ``datasets``."""
_LISTS = ("Sequence", "List", "LargeList")


def with_class_names(values: dict[str, Any], labeled: Features) -> dict[str, Any]:
    """Return the values of a row with the name of each class in place of its index. A missing label
    (-1) is None.

    >>> label = {"_type": "ClassLabel", "names": ["a", "b"]}
    >>> with_class_names({"x": 1, "y": [{"z": 0}, None]}, {"x": label, "y": [{"z": label}]})
    {'x': 'b', 'y': [{'z': 'a'}, None]}
    """
    if not labeled:
        return values
    return values | {key: _named(values[key], labeled[key]) for key in labeled if key in values}


def _named(value: Any, feature: Any) -> Any:
    if value is None or not _has_labels(feature):
        return value
    if isinstance(feature, list) or feature.get("_type") in _LISTS:
        inner = feature[0] if isinstance(feature, list) else feature["feature"]
        if isinstance(value, dict):  # a sequence of objects is an object of lists in old versions
            return {key: _named(part, [inner[key]]) for key, part in value.items()}
        return [_named(each, inner) for each in value]
    if feature.get("_type") != "ClassLabel":
        return {key: _named(part, feature.get(key)) for key, part in value.items()}
    names = feature["names"]
    return str(names[value]) if 0 <= value < len(names) else None


def labels_in_schema(metadata: Mapping[bytes, bytes] | None) -> Features:
    """Return the features with class labels in the metadata of a schema that ``datasets`` wrote."""
    text = (metadata or {}).get(_KEY)
    return {} if text is None else _parsed(text)


@lru_cache(maxsize=64)
def _parsed(text: bytes) -> Features:
    try:
        return labels_in_features(json.loads(text)["info"]["features"])
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError):
        return {}  # of another program


def labels_in_features(features: Features) -> Features:
    """Return the features that contain class labels."""
    return {key: feature for key, feature in features.items() if _has_labels(feature)}


def _has_labels(feature: Any) -> bool:
    if isinstance(feature, list):
        return any(map(_has_labels, feature))
    if not isinstance(feature, dict):
        return False
    if feature.get("_type") == "ClassLabel":
        return isinstance(feature.get("names"), list)
    return any(map(_has_labels, feature.values()))
