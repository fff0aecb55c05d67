"""YAML for recipes and overrides. Text remains text, and numbers that YAML would read differently
from their appearance are refused.

Differences from YAML 1.1 (PyYAML): ``1e-6`` is a number; dates are text; ``010`` (octal 8) and
``1:00`` (base 60) are errors; a repeated key is an error; a plain value of a text field (``name:
010``, ``split: no``) is text as written. Size, depth and alias expansion are limited, so that no
file takes long to read."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import yaml

from burnish.config.older import type_below
from burnish.config.schema import allows_none, is_list, is_text, item_of, nodes_in

_MAX_CHARACTERS = 4 << 20
_MAX_NODES = 50_000
"""Maximum number of values of one document; each alias counts as its expansion."""
_MAX_DEPTH = 64

_STR, _NULL, _MERGE = (f"tag:yaml.org,2002:{name}" for name in ("str", "null", "merge"))
_FLOAT = re.compile(r"^[-+]?[0-9][0-9_]*(\.[0-9_]*)?[eE][-+]?[0-9]+$")  # YAML 1.1: 1e-6 is text
_PROSE = re.compile(r"(^|_)(prompt|template|separator|alphabet)$")
"""Text fields in which `` #`` is more likely part of the text than the start of a comment."""
_NULLS = ("", "~", "null", "Null", "NULL")


class RecipeLoader(yaml.SafeLoader):
    """PyYAML's safe loader with the differences listed in the module docstring."""

    def __init__(self, stream: Any) -> None:
        super().__init__(stream)
        self._depth = self._num_nodes = 0

    def compose_node(self, parent: Any, index: Any) -> Any:
        """Return the node. Raises a YAML error beyond the limits of depth and size."""
        self._depth += 1
        self._num_nodes += 1
        if self._depth > _MAX_DEPTH or self._num_nodes > _MAX_NODES:
            event: Any = self.peek_event()  # type: ignore[no-untyped-call]
            raise _error(_too_much(self._depth), event.start_mark)
        node = super().compose_node(parent, index)
        self._depth -= 1
        return node

    def get_single_node(self) -> Any:
        """Return the document with its aliases expanded."""
        node = super().get_single_node()
        return None if node is None else _Expansion().copy(node, ())

    def construct_mapping(self, node: Any, deep: bool = False) -> dict[Any, Any]:
        """Return the mapping. Raises a YAML error with the line of a repeated key."""
        seen: set[str] = set()
        for key, _ in node.value:
            if not isinstance(key, yaml.ScalarNode):
                raise _error("a key is a list or a mapping; write it as text", key.start_mark)
            if key.value in seen:
                raise _error(f"the key {key.value!r} occurs twice; remove one", key.start_mark)
            seen.add(key.value)
        return super().construct_mapping(node, deep=deep)

    def construct_number(self, node: Any) -> int | float:
        """Return the number. Raises a YAML error if YAML 1.1 reads a different number than people
        do."""
        text = self.construct_scalar(node)
        bare = text.lstrip("+-").replace("_", "")
        if ":" in text or (node.tag.endswith("int") and re.fullmatch(r"0[0-7]+", bare)):
            base = "base 60" if ":" in text else "octal"
            raise _error(
                f"YAML reads {text} as {base}, a different number; write the number in decimal, or "
                f'put it in quotes ("{text}") if it is text',
                node.start_mark,
            )
        try:
            if node.tag.endswith("int"):
                return self.construct_yaml_int(node)
            return self.construct_yaml_float(node)
        except ValueError as error:  # an int of more digits than Python converts
            shown = text if len(text) < 40 else f"{text[:20]}... ({len(text)} characters)"
            raise _error(f"{shown} is not a valid number: {error}", node.start_mark) from None


_LEFT_OUT = ("tag:yaml.org,2002:timestamp", "tag:yaml.org,2002:value")
"""PyYAML's rules for plain values that recipes do not use."""
RecipeLoader.yaml_implicit_resolvers = {
    character: [rule for rule in rules if rule[0] not in _LEFT_OUT]
    for character, rules in yaml.SafeLoader.yaml_implicit_resolvers.items()
}
RecipeLoader.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))
RecipeLoader.add_constructor("tag:yaml.org,2002:int", RecipeLoader.construct_number)
RecipeLoader.add_constructor("tag:yaml.org,2002:float", RecipeLoader.construct_number)


class _RecipeDumper(yaml.SafeDumper):
    """Dumper that quotes text that :class:`RecipeLoader` would read as a number."""


_RecipeDumper.add_implicit_resolver("tag:yaml.org,2002:float", _FLOAT, list("-+0123456789"))


def read_text(path: Path, *, errors: str = "strict") -> str:
    """Return the text of a file. Raises YAMLError, before it is read, for a pipe or device, or a
    file that is larger than any recipe; OSError or UnicodeDecodeError."""
    if path.exists() and not path.is_file():
        raise yaml.YAMLError("it is not a regular file")
    size = path.stat().st_size
    if size > 4 * _MAX_CHARACTERS:  # bytes of a character
        raise yaml.YAMLError(
            f"it has {size} bytes, but a recipe has at most {_MAX_CHARACTERS} characters; is it a "
            "data file?"
        )
    return path.read_text(encoding="utf-8", errors=errors)


def compose(text: str, *, name: str = "<text>") -> tuple[RecipeLoader, Any]:
    """Return (loader, node) of one document. The node is None if the document is empty. Raises
    YAMLError."""
    if len(text) > _MAX_CHARACTERS:
        raise yaml.YAMLError(
            f"it has {len(text)} characters, but a recipe has at most {_MAX_CHARACTERS}; is it a "
            "data file?"
        )
    loader = RecipeLoader(text)
    loader.name = name
    return loader, loader.get_single_node()


def construct(loader: RecipeLoader, node: Any, annotation: Any, *, source: str) -> Any:
    """Return the value of ``node``, which :func:`compose` made from ``source``, for a field of type
    ``annotation``. Raises YAMLError."""
    if node is None:
        return None
    _keep_text(node, annotation, field="", source=source)
    return loader.construct_document(node)


def load(text: str, *, name: str = "<text>") -> Any:
    """Return the value of one document; None if it is empty. Raises YAMLError."""
    loader, node = compose(text, name=name)
    return None if node is None else loader.construct_document(node)


def field_value(text: str, annotation: Any) -> Any:
    """Return the value of the right side of ``key=value`` for a field of type ``annotation``.

    A text field gets ``text`` unchanged, except that enclosing quotes are removed and, if the field
    may be null, ``null`` becomes None. Raises YAMLError."""
    if is_text(annotation):
        if allows_none(annotation) and text in _NULLS:
            return None
        quoted = _quoted(text)
        return text if quoted is None else quoted
    loader, node = compose(text)
    if node is not None and text[node.end_mark.index :].strip():
        raise yaml.YAMLError("` #` begins a YAML comment, so the rest would be ignored; use quotes")
    return construct(loader, node, annotation, source=text)


def dump(tree: Any) -> str:
    """Return ``tree`` as YAML that :class:`RecipeLoader` reads back to an equal tree."""
    options: dict[str, Any] = {"Dumper": _RecipeDumper, "sort_keys": False}
    text: str = yaml.dump(tree, allow_unicode=True, **options)
    # YAML folds some rare line breaks (U+0085, U+2028) even inside quotes: escape them then.
    if not text.isascii() and yaml.load(text, Loader=RecipeLoader) != tree:
        text = yaml.dump(tree, allow_unicode=False, **options)
    return text


class _Expansion:
    """Copies of nodes in which each alias is replaced by a copy of its target."""

    def __init__(self) -> None:
        self._num_nodes = 0

    def copy(self, node: Any, above: tuple[int, ...]) -> Any:
        self._num_nodes += 1
        if id(node) in above:
            raise _error("an alias refers to a node that contains it", node.start_mark)
        if self._num_nodes > _MAX_NODES or len(above) > _MAX_DEPTH:
            raise _error(_too_much(len(above)) + " (after alias expansion)", node.start_mark)
        inside = (*above, id(node))
        if isinstance(node, yaml.ScalarNode):
            value: Any = node.value
        elif isinstance(node, yaml.SequenceNode):
            value = [self.copy(item, inside) for item in node.value]
        else:
            value = [(self.copy(k, inside), self.copy(v, inside)) for k, v in node.value]
        copied = type(node)(node.tag, value, node.start_mark, node.end_mark)
        if isinstance(node, yaml.ScalarNode):
            copied.style = node.style
        return copied


def _keep_text(node: Any, annotation: Any, *, field: str, source: str) -> None:
    """Convert plain values below ``node`` to text if they belong to text fields, or are short forms
    of a mapping (a source that is only a path, ``mode: all``)."""
    if isinstance(node, yaml.MappingNode):
        for key, value in node.value:
            below = annotation
            if isinstance(key, yaml.ScalarNode) and key.tag != _MERGE:
                key.tag = _STR
                below = type_below(annotation, key.value)
            name = key.value if isinstance(key, yaml.ScalarNode) else ""
            _keep_text(value, below, field=name, source=source)
    elif isinstance(node, yaml.SequenceNode):
        below = item_of(annotation) if is_list(annotation) else annotation
        for item in node.value:
            _keep_text(item, below, field=field, source=source)
    elif (is_text(annotation) or nodes_in(annotation)) and not node.style:  # no quotes, no block
        rest = source[node.end_mark.index :].partition("\n")[0]
        if _PROSE.search(field) and rest.lstrip().startswith("#"):
            raise _error(
                f"{field} ends at a ` #`, which begins a YAML comment. Put the value in quotes if "
                "the rest belongs to it; otherwise put the comment on a separate line",
                node.end_mark,
            )
        if node.tag != _NULL:
            node.tag = _STR


def _quoted(text: str) -> str | None:
    """Return the content of a YAML text that is entirely in quotes, or None for any other."""
    try:
        node = compose(text)[1] if text.strip()[:1] in ("'", '"') else None
    except yaml.YAMLError:
        return None
    if not isinstance(node, yaml.ScalarNode) or node.style not in ("'", '"'):
        return None
    return None if text[node.end_mark.index :].strip() else str(node.value)


def _too_much(depth: int) -> str:
    if depth > _MAX_DEPTH:
        return f"it is nested deeper than {_MAX_DEPTH} levels"
    return f"it has more than {_MAX_NODES} values"


def _error(problem: str, mark: Any) -> yaml.YAMLError:
    return yaml.constructor.ConstructorError(None, None, problem, mark)
