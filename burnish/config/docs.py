"""Print the config tree of one job as a table: ``burnish config``.

Every text is the docstring under the field, so each field is documented only in its declaration."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from burnish.config.base import Node
from burnish.config.registry import JOBS
from burnish.config.schema import is_list, kinds_of, nodes_in, type_words, value_of

TABLE_HEAD = ("key | type | default | meaning", "-|-|-|-")
"""First lines of a table of keys."""


class FieldRow(NamedTuple):
    """One key of a recipe."""

    path: str
    type: str
    default: str
    text: str


def fields_table(job: str) -> list[FieldRow]:
    """Return every key of a job's recipe, in the order of the config classes.

    The text of a variant's key names the kinds that have it. A group of keys that occurs several
    times in the tree (such as a model's) is listed once and referenced afterward."""
    return list(_rows(JOBS[job], "", seen={}))


def job_markdown(job: str) -> str:
    """Return every key of one job as a Markdown table."""
    lines = [f"## {job}", "", class_text(JOBS[job]), "", *TABLE_HEAD]
    for row in fields_table(job):
        lines.append(key_row(*row))
    return "\n".join(lines) + "\n"


def key_row(path: str, kind: str, default: str, text: str) -> str:
    """Return the row of one key in a Markdown table."""
    return table_row(f"`{path}`", kind, f"`{default}`" if default else "", text)


def table_row(*cells: str) -> str:
    """Return one row of a Markdown table, without bars at the ends."""
    escaped = (cell.replace("|", "\\|") for cell in cells)
    return " | ".join(escaped)


def class_text(cls: type[Node]) -> str:
    """Return the docstring of a config class on one line, with Markdown's single backticks."""
    return _one_line(inspect.getdoc(cls) or "")


def own_text(cls: type[Node]) -> str:
    """Return the docstring that a class itself defines, on one line, or an empty string."""
    return _one_line(inspect.cleandoc(vars(cls).get("__doc__") or ""))


def _rows(node: type[Node], above: str, *, seen: dict[type[Node], str]) -> Iterator[FieldRow]:
    for name, field in node.model_fields.items():
        path, below = f"{above}{name}", nodes_in(field.annotation)
        text = field_text(field)
        known = [seen[variant] for variant in below if variant in seen]
        if known:
            text = f"{text} Keys as under `{known[0]}`.".strip()
        yield FieldRow(path, type_words(field.annotation), default_text(field), text)
        if not known:
            seen.update({variant: path for variant in below})
            inner = f"{path}.{_item_key(field.annotation)}"
            for variant in below:
                yield from _variant_rows(variant, inner, seen=seen)


def _item_key(annotation: Any) -> str:
    """Return the key between a field and the keys of the nodes in it."""
    if is_list(annotation):
        return "N."
    return "NAME." if value_of(annotation) is not None else ""


def _variant_rows(
    node: type[Node], above: str, *, seen: dict[type[Node], str]
) -> Iterator[FieldRow]:
    """Yield the rows of a node below a field. Those of a variant begin with its kinds."""
    kinds = kinds_of(node)
    if not kinds:
        yield from _rows(node, above, seen=seen)
        return
    label = f"[{' | '.join(kinds)}]"
    for row in _rows(node, above, seen=seen):
        if row.path == f"{above}kind":
            words = f"{class_text(node)} {row.text}".strip()
            yield row._replace(text=f"{label} {words}")
        else:
            yield row._replace(text=f"{label} {row.text}")


def default_text(field: FieldInfo) -> str:
    """Return the default of a field as YAML, or ``required``; empty for a node without kinds."""
    if field.is_required():
        return "required"
    value = field.get_default(call_default_factory=True)
    if value is PydanticUndefined:
        return ""
    if isinstance(value, Node):
        kind = value.model_dump().get("kind")
        return str(kind) if kind else ""
    return repr(value) if isinstance(value, float) else _as_yaml(value)


def _as_yaml(value: Any) -> str:
    if isinstance(value, tuple) and value and isinstance(value[0], Node):
        plain: Any = [item.model_dump(include={"kind"}) for item in value]
    else:
        plain = list(value) if isinstance(value, tuple) else value
    style = '"' if isinstance(plain, str) and "\n" in plain else None
    text = yaml.safe_dump(plain, default_flow_style=True, default_style=style, width=1000)
    return text.strip().removesuffix("...").strip()


def field_text(field: FieldInfo) -> str:
    """Return the help text of a field on one line, with Markdown's single backticks."""
    return _one_line(field.description or "")


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")
