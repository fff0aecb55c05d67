"""The config tree as a table: what ``burnish config`` prints and ``docs/config.md`` is made of.

Every text is the docstring under the field, so a field is documented where it is declared and
nowhere else."""

from __future__ import annotations

import inspect
from collections.abc import Iterator
from typing import Any, NamedTuple

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from burnish.config.base import Node
from burnish.config.registry import JOBS
from burnish.config.schema import is_list, kinds_of, nodes_in, type_words

_INTRO = """# Configuration

Every key of every job, with its type, default and meaning. This page is generated
(`make docs`); the texts stand under the fields in `burnish/config/`.

Keys are set in the recipe (YAML) or on the command line (`train.lr=1e-6`); the dotted name is the
same. A text that begins with a name in brackets is of a key that exists for that `kind` only.
`N` stands for an item's number in a list: `rewards.0.weight=2`. An unknown key is an error.
"""


class FieldRow(NamedTuple):
    """One key of a recipe."""

    path: str
    type: str
    default: str
    text: str


def fields_table(job: str) -> list[FieldRow]:
    """Every key of a job's recipe, in the order of the config classes.

    The keys of a variant say in their text for which kinds they exist. A group of keys that stands
    in the tree several times (such as a model's) is spelt out once and referred to after that."""
    return list(_rows(JOBS[job], "", seen={}))


def config_markdown() -> str:
    """The whole of ``docs/config.md``."""
    return _INTRO + "".join(f"\n{job_markdown(job)}" for job in JOBS)


def job_markdown(job: str) -> str:
    """One job's section of ``docs/config.md``."""
    lines = [f"## {job}", "", class_text(JOBS[job]), "", "| key | type | default | meaning |"]
    lines.append("| --- | --- | --- | --- |")
    for row in fields_table(job):
        cells = (f"`{row.path}`", row.type, f"`{row.default}`" if row.default else "", row.text)
        lines.append("| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |")
    return "\n".join(lines) + "\n"


def class_text(cls: type[Node]) -> str:
    """A config class's docstring on one line, with Markdown's single backticks."""
    return _one_line(inspect.getdoc(cls) or "")


def _rows(node: type[Node], above: str, *, seen: dict[type[Node], str]) -> Iterator[FieldRow]:
    for name, field in node.model_fields.items():
        path, below = f"{above}{name}", nodes_in(field.annotation)
        text = _one_line(field.description or "")
        known = [seen[variant] for variant in below if variant in seen]
        if known:
            text = f"{text} Keys as under `{known[0]}`.".strip()
        yield FieldRow(path, type_words(field.annotation), _default(field), text)
        if not known:
            seen.update({variant: path for variant in below})
            inner = f"{path}.N." if is_list(field.annotation) else f"{path}."
            for variant in below:
                yield from _variant_rows(variant, inner, seen=seen)


def _variant_rows(
    node: type[Node], above: str, *, seen: dict[type[Node], str]
) -> Iterator[FieldRow]:
    """The rows of a node below a field; those of a variant begin with its kinds."""
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


def _default(field: FieldInfo) -> str:
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


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")
