"""Compare two recipes key by key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def changed_settings(then: Mapping[str, Any], now: Mapping[str, Any]) -> dict[str, str]:
    """Return dotted key -> ``old then, new now``, in key order, for two resolved configs as trees
    of plain values.

    >>> changed_settings({"train": {"lr": 0.1, "kind": "sgd"}}, {"train": {"lr": 0.2}})
    {'train.kind': "'sgd' then, None now", 'train.lr': '0.1 then, 0.2 now'}
    """
    old, new = _flat(then), _flat(now)
    return {
        key: f"was {old.get(key)!r}, now {new.get(key)!r}"
        for key in sorted(old.keys() | new.keys())
        if old.get(key) != new.get(key)
    }


def _flat(tree: Any, path: str = "") -> dict[str, Any]:
    """Return dotted key -> value; an empty mapping or list is a value."""
    if isinstance(tree, Mapping) and tree:
        items: Any = tree.items()
    elif isinstance(tree, list) and tree:
        items = enumerate(tree)
    else:
        return {path: tree}
    found: dict[str, Any] = {}
    for key, value in items:
        found |= _flat(value, f"{path}.{key}" if path else str(key))
    return found
