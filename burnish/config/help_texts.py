"""Help texts of the keys of a recipe: the docstrings below the fields of config classes.

They are read from the source when the first one is asked for. pydantic can collect them too
(``use_attribute_docstrings``), but does so whenever a class is defined. That takes 0.3 of the 0.8 s
in which ``burnish.cli`` is imported, and more in a process with many modules."""

from __future__ import annotations

import ast
import functools
import inspect
import sys
from collections.abc import Iterator, Mapping

from pydantic.fields import FieldInfo

from burnish.config.base import Node

_described: set[type[Node]] = set()


def help_text(field: FieldInfo) -> str:
    """Return the help text of a field of any config class, empty if it has none."""
    for cls in _below(Node):
        if cls not in _described:
            _described.add(cls)
            _describe(cls)
    return field.description or ""


def _below(cls: type[Node]) -> Iterator[type[Node]]:
    for child in cls.__subclasses__():
        yield child
        yield from _below(child)


def _describe(cls: type[Node]) -> None:
    """Set the descriptions of the fields of a class. A field has the text of the class that
    declares it last."""
    declared = [texts for owner in cls.__mro__ if (texts := _texts_of(owner))]
    for name, field in cls.model_fields.items():
        field.description = next((texts[name] for texts in declared if name in texts), None)


def _texts_of(cls: type) -> Mapping[str, str | None]:
    """Return the text, or None, of each field that a class itself declares."""
    return _texts_of_module(cls.__module__).get(cls.__qualname__, {})


@functools.cache
def _texts_of_module(name: str) -> Mapping[str, Mapping[str, str | None]]:
    """Return the texts of all classes of a module, by qualified name; none without its source."""
    try:
        tree = ast.parse(inspect.getsource(sys.modules[name]))
    except (KeyError, OSError, TypeError):
        return {}
    return dict(_classes(tree, ""))


def _classes(node: ast.AST, above: str) -> Iterator[tuple[str, Mapping[str, str | None]]]:
    for child in ast.iter_child_nodes(node):
        if isinstance(child, ast.ClassDef):
            yield above + child.name, _fields(child)
            yield from _classes(child, f"{above}{child.name}.")
        elif isinstance(child, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield from _classes(child, f"{above}{child.name}.<locals>.")


def _fields(cls: ast.ClassDef) -> dict[str, str | None]:
    texts: dict[str, str | None] = {}
    for statement, below in zip(cls.body, [*cls.body[1:], None], strict=True):
        if isinstance(statement, ast.AnnAssign) and isinstance(statement.target, ast.Name):
            texts[statement.target.id] = _text(below)
    return texts


def _text(statement: ast.stmt | None) -> str | None:
    if isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Constant):
        value = statement.value.value
        return inspect.cleandoc(value) if isinstance(value, str) else None
    return None
