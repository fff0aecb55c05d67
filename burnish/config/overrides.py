"""``dotted.key=value`` from the command line, written into a recipe before it is validated."""

from __future__ import annotations

import re
import typing
from typing import Any

import yaml

from burnish.config.base import Node
from burnish.config.schema import is_list, kinds_of, nodes_in


class OverrideError(ValueError):
    """One override that cannot be applied: which, where it fails, and what can be written there."""


class RecipeLoader(yaml.SafeLoader):
    """YAML as people mean it: ``1e-6`` is a number, and a key that stands twice is an error."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping, or a YAML error that names the line of a repeated key."""
        seen: set[str] = set()
        for key, _ in node.value:
            if key.value in seen:
                problem = f"the key {key.value!r} stands here twice; remove one"
                raise yaml.constructor.ConstructorError(None, None, problem, key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)


RecipeLoader.add_implicit_resolver(
    "tag:yaml.org,2002:float",
    re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$"),  # YAML 1.1 reads 1e-6 as text
    list("-+0123456789"),
)


def apply_override(tree: dict[str, Any], override: str, cls: type[Node]) -> None:
    """Set one ``dotted.key=value`` in ``tree``, which will be validated as ``cls``.

    List items are reached by number. A short form on the way (``advantage: gae``, a source that is
    only a path) opens into its node so that its options can be set. Raises OverrideError."""
    keys, value = _parse(override)
    node: Any = tree
    annotation: Any = cls
    for i, key in enumerate(keys[:-1]):
        slot = _slot(node, key, path=".".join(keys[:i]), override=override)
        if not isinstance(node, list):
            annotation = _field(annotation, key)
        child = node[slot] if isinstance(node, list) else node.get(slot)
        path = ".".join(keys[: i + 1])
        node[slot] = _opened(child, annotation, path=path, override=override)
        node = node[slot]
    node[_slot(node, keys[-1], path=".".join(keys[:-1]), override=override)] = value


def _parse(override: str) -> tuple[list[str], Any]:
    dotted, sign, text = override.partition("=")
    keys = dotted.strip().split(".")
    if not sign or not all(keys):
        raise OverrideError(
            f"override {override!r} is not of the form dotted.key=value, such as train.lr=1e-6"
        )
    try:
        return keys, yaml.load(text, Loader=RecipeLoader)
    except yaml.YAMLError as error:
        reason = " ".join(str(error).split())
        raise OverrideError(f"override {override!r}: the value is not YAML: {reason}") from None


def _field(annotation: Any, key: str) -> Any:
    """The annotation of a key below ``annotation``; None where the key is not known (validation
    says so)."""
    fields = [node.model_fields[key] for node in nodes_in(annotation) if key in node.model_fields]
    return fields[0].annotation if fields else None


def _opened(node: Any, annotation: Any, *, path: str, override: str) -> Any:
    """``node`` as a mapping or list that the next key can go into."""
    if isinstance(node, (dict, list)):
        return node
    below = nodes_in(annotation)
    if node is None and is_list(annotation):
        raise OverrideError(
            f"override {override!r}: the recipe does not set {path}, so it has no items to change; "
            f"give the whole list: '{path}=[...]'"
        )
    if node is None and (annotation is None or below or typing.get_origin(annotation) is dict):
        return {}
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
        raise OverrideError(f"override {override!r}: {path} has {items}, and no {key!r}")
    return int(key)
