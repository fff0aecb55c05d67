"""Print the config tree: all keys of one job as a table (``burnish config``), and
``docs/config.md`` with every node once and links from the keys that hold it.

Every text is the docstring under the field, so each field is documented only in its declaration.
Reading order: :func:`fields_table`; then :func:`config_markdown`, :func:`sections`, the tables."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable, Iterator
from typing import NamedTuple

import yaml
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from burnish.config.base import Node
from burnish.config.help_texts import help_text
from burnish.config.job import JobConfig
from burnish.config.registry import JOBS
from burnish.config.schema import has_variable, is_list, kinds_of, nodes_in, type_words, value_of

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
            is_mapping = value_of(field.annotation) is not None
            inner = f"{path}." + ("N." if is_list(field.annotation) else "NAME." * is_mapping)
            for variant in below:
                yield from _variant_rows(variant, inner, seen=seen)


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
    if isinstance(value, float):
        return repr(value)
    if isinstance(value, tuple):
        is_nodes = bool(value) and isinstance(value[0], Node)
        value = [item.model_dump(include={"kind"}) if is_nodes else item for item in value]
    style = '"' if isinstance(value, str) and "\n" in value else None
    text = yaml.safe_dump(value, default_flow_style=True, default_style=style, width=1000)
    return text.strip().removesuffix("...").strip()


def field_text(field: FieldInfo) -> str:
    """Return the help text of a field on one line, with Markdown's single backticks."""
    return _one_line(help_text(field))


def _one_line(text: str) -> str:
    return " ".join(text.split()).replace("``", "`")


_INTRO = """# Configuration

Every key of every job, with its type, default and meaning. Generated by `make docs` from the
docstrings below the fields in `burnish/config/`. `burnish config JOB` prints all keys of one job in
one table.

Keys are set in the recipe (YAML) or on the command line by their dotted name: `train.lr=1e-6` is
the key `lr` of the section `train`, and `rewards.0.weight=2` that of the first item of a list. An
unknown key is an error; keys of an older form are read.

A type with a link is a mapping with the keys of the linked section. If the link is `kind`, the key
`kind` of the mapping selects a variant of the linked section; the keys of a variant follow its name
in bold. A key with the default `null` also accepts null. The key `job` names the job.

Each section is printed once: it names the other places and jobs that have the same keys. A section
includes the keys of the sections that it names, except those that it lists itself.
"""

Uses = dict[type[Node], dict[str, list[str]]]
"""Node -> dotted path -> jobs that have the node at this path."""


class Section(NamedTuple):
    """Place on the page of one node, or of all variants of one key with their common keys."""

    title: str
    path: str
    """Dotted path of the node; empty for a job."""
    also_at: str = ""
    """Other paths of the node, each with its jobs."""

    @property
    def anchor(self) -> str:
        """Anchor of the title, as GitHub derives it."""
        return re.sub(r"[^\w\- ]", "", self.title.lower()).replace(" ", "-")


Page = dict[type[Node], Section]
"""Node or class of common keys -> its section, in page order."""


def config_markdown() -> str:
    """Return the text of ``docs/config.md``."""
    page = sections()
    classes: dict[Section, list[type[Node]]] = {}
    for cls, section in page.items():
        classes.setdefault(section, []).append(cls)
    lines = [_INTRO, "## Jobs", "", f"{_links(page[cls] for cls in JOBS.values())}.", ""]
    for section in (section for section in classes if not section.path):
        lines += _section(section, classes[section], page)
    lines += ["## Groups of keys", ""]
    for section in (section for section in classes if section.path):
        lines += _section(section, classes[section], page)
    return "\n".join(lines).rstrip() + "\n"


def sections() -> Page:
    """Return the section of every job, node and class of common keys, in page order.

    A class of common keys is a class that no recipe contains directly, with two or more subclasses
    that a recipe contains."""
    uses: Uses = {}
    for name, job in JOBS.items():
        _add_uses(uses, job, name, above="", seen=set())
    jobs = list(JOBS.values())
    names: dict[type[Node], str] = {cls: name for name, cls in JOBS.items()}
    fields = (field for cls in [*jobs, *uses] for field in cls.model_fields.values())
    unions = [nodes_in(field.annotation) for field in fields]
    variants = {node: nodes for nodes in unions for node in nodes if kinds_of(node)}
    page: Page = {}
    for cls in [*jobs, *uses]:
        for base in [b for b in _common_bases(cls, [*jobs, *uses]) if b not in page]:
            heirs = [c for c in (*jobs, *uses) if issubclass(c, base)]
            if all(heir in variants.get(cls, ()) for heir in heirs):
                page[base] = _node_section(cls, uses, variants)
            else:
                path = next(iter(uses.get(heirs[0], {"": []})))
                words = " ".join(re.findall(r"[A-Z][a-z]+", base.__name__)).capitalize()
                of_jobs = "Every job" if base is JobConfig else f"{words}s"
                section = Section(f"`{path}`" if path else of_jobs, path)
                if section in page.values():  # that of a more general base
                    names_of = dict.fromkeys(job for heir in heirs for job in uses[heir][path])
                    section = section._replace(title=f"`{path}` ({', '.join(names_of)})")
                page[base] = section
        title = names.get(cls, "")
        page[cls] = Section(title, "") if title else _node_section(cls, uses, variants)
    return page


def _add_uses(
    uses: Uses, owner: type[Node], job: str, *, above: str, seen: set[type[Node]]
) -> None:
    """Add every node below ``owner``. If several nodes contain a node, its path is the first one
    found, and the paths below it begin with that path."""
    for name, field in owner.model_fields.items():
        for node in nodes_in(field.annotation):
            jobs = uses.setdefault(node, {}).setdefault(above + name, [])
            if job not in jobs:
                jobs.append(job)
            if node not in seen:
                seen.add(node)
                _add_uses(uses, node, job, above=f"{next(iter(uses[node]))}.", seen=seen)


def _common_bases(cls: type[Node], all_classes: list[type[Node]]) -> list[type[Node]]:
    """Return the classes of common keys above ``cls``, the most general first. Of several with the
    same subclasses only the most specific counts."""
    bases = [b for b in cls.__mro__[1:] if issubclass(b, Node)]
    above = [b for b in bases if not b.model_fields.keys() <= {"kind", "job"}]
    heirs = {b: frozenset(c for c in all_classes if issubclass(c, b)) for b in above}
    nearest = {heirs[b]: b for b in reversed(above)}
    return [b for subclasses, b in nearest.items() if b not in all_classes and len(subclasses) > 1]


def _node_section(
    cls: type[Node], uses: Uses, variants: dict[type[Node], list[type[Node]]]
) -> Section:
    """Name a node by its path. Append its jobs if other nodes, except variants of the same key,
    have the same path."""
    (path, jobs), *others = uses[cls].items()
    also = ", ".join(f"`{other}` ({', '.join(names)})" for other, names in others)
    same = [c for c in uses if next(iter(uses[c])) == path and c not in variants.get(cls, [cls])]
    return Section(f"`{path}` ({', '.join(jobs)})" if same else f"`{path}`", path, also)


def _section(section: Section, classes: list[type[Node]], page: Page) -> Iterator[str]:
    """Yield the heading, text and table of one section: first the node or the common keys, then
    the variants."""
    texts, rows = [], []
    for cls in sorted(classes, key=lambda cls: bool(kinds_of(cls))):
        text = own_text(cls)
        if kinds_of(cls):
            text = f"{text} {field_text(cls.model_fields['kind'])}".strip()
        bases = [b for b in reversed(cls.__mro__[1:]) if b in page and page[b] != page[cls]]
        if bases:  # the nearest ones
            near = [b for b in bases if not any(c is not b and issubclass(c, b) for c in bases)]
            text += f" Includes {_links(page[b] for b in near)}."
        if kinds_of(cls):
            rows.append(table_row(f"**{', '.join(kinds_of(cls))}**", "", "", text))
        else:
            texts.append(text)
        rows += [
            _page_row(name, field, page)
            for name, field in cls.model_fields.items()
            if name not in ("kind", "job") and not _is_elsewhere(name, cls, page)
        ]
    if section.also_at:
        texts.append(f"Also at {section.also_at}.")
    yield from (f"### {section.title}", "")
    if texts:
        yield from (" ".join(texts), "")
    if rows:
        yield from (*TABLE_HEAD, *rows, "")


def _is_elsewhere(name: str, cls: type[Node], page: Page) -> bool:
    """Return whether a key is printed for a base, or is replaced in every section that includes
    it."""
    if has_variable(cls.model_fields[name].annotation):
        return True
    row = _page_row(name, cls.model_fields[name], page)
    bases = [b for b in reversed(cls.__mro__[1:]) if b in page]
    inherited = [b.model_fields[name] for b in bases if name in b.model_fields]
    heirs = [c for c in page if c is not cls and issubclass(c, cls) and c in JOBS.values()]
    replaced = bool(heirs) and all(
        _page_row(name, c.model_fields[name], page) != row for c in heirs
    )
    return replaced or (bool(inherited) and _page_row(name, inherited[-1], page) == row)


def _page_row(path: str, field: FieldInfo, page: Page) -> str:
    return key_row(path, _linked_type(field, page), default_text(field), field_text(field))


_SHORT = {"whole number": "int", "true or false": "bool", "number": "float", "text": "str"}
"""Words of errors -> names of types in the tables."""


def _linked_type(field: FieldInfo, page: Page) -> str:
    """Return the type of a field, with links from its nodes to their sections. Null is named only
    if it is not the default."""
    words = type_words(field.annotation)
    if default_text(field) == "null":
        words = words.removesuffix(", or null")
    for long, short in _SHORT.items():
        words = words.replace(long, short)
    words = re.sub(r"list \((.*) each\)", r"list of \1", words)
    nodes = nodes_in(field.annotation)
    if nodes:
        kinds = " | ".join(kind for node in nodes for kind in kinds_of(node))
        plain, short = (f"mapping with kind: {kinds}", "kind") if kinds else ("mapping",) * 2
        words = words.replace(plain, _link(short, page[nodes[0]]))
    return words


def _link(text: str, section: Section) -> str:
    return f"[{text}](#{section.anchor})"


def _links(targets: Iterable[Section]) -> str:
    return ", ".join(_link(section.title, section) for section in targets)
