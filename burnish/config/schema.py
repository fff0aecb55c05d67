"""Introspection of the config classes: the nodes a field may hold, and its type in words.

Used by the error messages (``explain.py``), overrides (``load.py``) and docs (``docs.py``)."""

from __future__ import annotations

import types
import typing
from typing import Any, TypeVar

from burnish.config.base import Node

_WORDS: dict[Any, str] = {
    int: "whole number",
    float: "number",
    str: "text",
    bool: "true or false",
    dict: "mapping",
    Any: "anything",
}


def nodes_in(annotation: Any) -> list[type[Node]]:
    """Return every node class inside an annotation, in the order written.

    >>> from burnish.config.model import ModelConfig
    >>> nodes_in(tuple[ModelConfig, ...] | None) == [ModelConfig]
    True
    """
    annotation = _bare(annotation)
    if isinstance(annotation, type) and not isinstance(annotation, types.GenericAlias):
        return [annotation] if issubclass(annotation, Node) else []
    return [node for arg in typing.get_args(annotation) for node in nodes_in(arg)]


def kinds_of(node: type[Node]) -> tuple[str, ...]:
    """Return the values of ``kind`` that select this node; empty if it is not a variant."""
    field = node.model_fields.get("kind")
    return () if field is None else tuple(typing.get_args(field.annotation))


def has_variable(annotation: Any) -> bool:
    """Return whether an annotation has a type variable, which subclasses of its node replace."""
    return isinstance(annotation, TypeVar) or any(map(has_variable, typing.get_args(annotation)))


def is_list(annotation: Any) -> bool:
    """Return whether a field is written as a YAML list (also one that may be null)."""
    return typing.get_origin(_without_none(annotation)) in (tuple, list)


def item_of(annotation: Any) -> Any:
    """Return the annotation of the items of a list."""
    return typing.get_args(_without_none(annotation))[0]


def value_of(annotation: Any) -> Any:
    """Return the annotation of the values of a mapping, or None if it is not a mapping."""
    bare = _without_none(annotation)
    return typing.get_args(bare)[1] if typing.get_origin(bare) is dict else None


def is_text(annotation: Any) -> bool:
    """Return whether a field takes only text (it may also be null).

    >>> is_text(str | None), is_text(typing.Literal["on", "off"]), is_text(str | int)
    (True, True, False)
    """
    bare = _without_none(annotation)
    if typing.get_origin(bare) is typing.Literal:
        return all(isinstance(arg, str) for arg in typing.get_args(bare))
    return bare is str


def type_words(annotation: Any) -> str:
    """Return an annotation in words.

    >>> type_words(tuple[int, ...] | None)
    'list (whole number each), or null'
    """
    bare = _without_none(annotation)
    optional = ", or null" if allows_none(annotation) else ""
    return _words(bare) + optional


def _words(annotation: Any) -> str:
    origin, args = typing.get_origin(annotation), typing.get_args(annotation)
    nodes = nodes_in(annotation)
    kinds = [kind for node in nodes for kind in kinds_of(node)]
    if origin is typing.Literal:
        return " | ".join(str(arg) for arg in args)
    if origin in (tuple, list):
        fixed = Ellipsis not in args and origin is tuple
        inner = ", ".join(type_words(arg) for arg in args if arg is not Ellipsis)
        return f"list of {len(args)} ({inner})" if fixed else f"list ({inner} each)"
    if nodes:
        return f"mapping with kind: {' | '.join(kinds)}" if kinds else "mapping"
    if origin in (typing.Union, types.UnionType):
        return " or ".join(type_words(arg) for arg in args)
    return _WORDS.get(origin or annotation, str(annotation))


def _bare(annotation: Any) -> Any:
    while typing.get_origin(annotation) is typing.Annotated:
        annotation = typing.get_args(annotation)[0]
    return annotation


def allows_none(annotation: Any) -> bool:
    """Return whether a field may be null."""
    annotation = _bare(annotation)
    is_union = typing.get_origin(annotation) in (typing.Union, types.UnionType)
    return is_union and type(None) in typing.get_args(annotation)


def _without_none(annotation: Any) -> Any:
    annotation = _bare(annotation)
    if not allows_none(annotation):
        return annotation
    rest = tuple(arg for arg in typing.get_args(annotation) if arg is not type(None))
    return _bare(rest[0]) if len(rest) == 1 else typing.Union[rest]  # noqa: UP007 (built at run time)
