"""Compare two recipes key by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> ``was old, now new``, in key order, for two resolved configs as trees of
    plain values.

    >>> changed_settings({"train": {"lr": 0.1, "kind": "sgd"}}, {"train": {"lr": 0.2}})
    {'train.kind': "was 'sgd', now None", 'train.lr': 'was 0.1, now 0.2'}
    """
    changed = different_values(flat(then), flat(now))
    return {key: f"was {old!r}, now {new!r}" for key, (old, new) in changed.items()}


def different_values(
    first: Mapping[str, Any], second: Mapping[str, Any]
) -> dict[str, tuple[Any, Any]]:
    """Return key -> (value in ``first``, value in ``second``) for the keys whose values differ, in
    key order; None for a missing key."""
    return {
        key: (first.get(key), second.get(key))
        for key in sorted(first.keys() | second.keys())
        if first.get(key) != second.get(key)
    }


def flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return dotted key -> value; an empty mapping or list is a value."""
    if isinstance(tree, Mapping) and tree:
        items: Any = tree.items()
    elif isinstance(tree, list) and tree:
        items = enumerate(tree)
    else:
        return {path: tree}
    leaves: dict[str, Any] = {}
    for key, value in items:
        leaves |= flat(value, f"{path}.{key}" if path else str(key))
    return leaves
