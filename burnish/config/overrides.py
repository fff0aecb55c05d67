"""Apply ``dotted.key=value`` overrides from the command line to a recipe before validation."""

from __future__ import annotations

import typing
from typing import Any

import yaml

from burnish.config.base import Node, on_off
from burnish.config.older import present_value, type_below
from burnish.config.schema import is_list, item_of, kinds_of, nodes_in
from burnish.config.yaml_text import field_value
from burnish.errors import BurnishError


class OverrideError(BurnishError, ValueError):
    """An override that cannot be applied. The message contains the override, the failing part and
    the valid values."""


def apply_override(tree: dict[str, Any], override: str, cls: type[Node]) -> None:
    """Set one ``dotted.key=value`` in ``tree``, which will be validated as ``cls``.

    List items are addressed by number. A short form along the path (``advantage: gae``, a source
    that is only a path) is expanded to its node, so that its options can be set. Raises
    OverrideError."""
    keys, text = _parse(override)
    node: Any = tree
    annotation: Any = cls
    for i, key in enumerate(keys[:-1]):
        slot = _slot(node, key, path=".".join(keys[:i]), override=override)
        child = node[slot] if isinstance(node, list) else present_value(node, annotation, key)
        annotation = _below(annotation, key, in_list=isinstance(node, list))
        path = ".".join(keys[: i + 1])
        node[slot] = _opened(child, annotation, path=path, override=override)
        node = node[slot]
    slot = _slot(node, keys[-1], path=".".join(keys[:-1]), override=override)
    annotation = _below(annotation, keys[-1], in_list=isinstance(node, list))
    try:
        value = field_value(text, annotation)
        node[slot] = _merged(node, slot, value, annotation)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise OverrideError(
            f"override {override!r}: the value is not valid YAML: {reason}"
        ) from None


def _merged(node: Any, slot: Any, value: Any, annotation: Any) -> Any:
    """Return the value of an override. The name of a kind (``train.lr_scheduler=wsd``) keeps the
    keys of the present section, which were on the same level in earlier versions. Keys that the new
    kind does not have are left out if they are at their defaults."""
    present = node.get(slot) if isinstance(node, dict) else None
    kinds = [cls for cls in nodes_in(annotation) if cls.short_key]
    if not kinds or not isinstance(present, dict) or not isinstance(value, (str, int, float)):
        return value
    if on_off(value) != value:
        return value
    key = kinds[0].short_key
    fields = {name: f for cls in kinds for name, f in cls.model_fields.items()}
    chosen = next((cls for cls in kinds if value in kinds_of(cls)), kinds[0])
    section = {
        name: content
        for name, content in present.items()
        if name in chosen.model_fields or name not in fields or content != fields[name].default
    }
    return {**section, key: value}


def _parse(override: str) -> tuple[list[str], str]:
    dotted, sign, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not sign or not all(keys):
        raise OverrideError(
            f"override {override!r} is not of the form dotted.key=value, such as train.lr=1e-6"
        )
    return keys, text


def _below(annotation: Any, key: str, *, in_list: bool) -> Any:
    """Return the annotation of a key (or list item) below ``annotation``, or None if the key is
    unknown, which validation reports."""
    if in_list:
        return item_of(annotation) if is_list(annotation) else annotation
    return type_below(annotation, key)


def _opened(node: Any, annotation: Any, *, path: str, override: str) -> Any:
    """Return ``node`` as a mapping or list that the next key can be set in."""
    if isinstance(node, (dict, list)):
        return node
    below = nodes_in(annotation)
    if node is None and is_list(annotation):
        raise OverrideError(
            f"override {override!r}: the recipe does not set {path}, so it has no items to "
            f"change; set the complete list: '{path}=[...]'"
        )
    if node is None and (annotation is None or below or typing.get_origin(annotation) is dict):
        return {}
    if below and on_off(node) in ({}, None):
        return {}  # true and false, also as text
    if below and below[0].short_key and isinstance(node, (str, int, float)):
        return {below[0].short_key: node}
    if isinstance(node, str) and below:
        return _long_form(node, below)
    shown = "a plain value" if node is None else repr(node)
    raise OverrideError(f"override {override!r}: {path} is {shown}, which has no keys below it")


def _long_form(short: str, below: list[type[Node]]) -> dict[str, Any]:
    if short in [kind for variant in below for kind in kinds_of(variant)]:
        return {"kind": short}
    return {"path": short} if "path" in below[0].model_fields else {"kind": short}


def _slot(parent: Any, key: str, *, path: str, override: str) -> Any:
    if not isinstance(parent, list):
        return key
    if not key.isdigit() or int(key) >= len(parent):
        items = f"items 0..{len(parent) - 1}" if parent else "no items"
        raise OverrideError(f"override {override!r}: {path} has {items}, but no {key!r}")
    return int(key)
