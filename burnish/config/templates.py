"""Prompt templates: Python format strings over the columns of a row."""

from __future__ import annotations

import string
from collections.abc import Iterator, Sequence

from burnish.config.columns import missing_columns
from burnish.errors import BurnishError


class TemplateError(BurnishError, ValueError):
    """A template that cannot be filled from columns. The message contains the part, the cause and a
    fix."""


def fields_of(template: str) -> list[str]:
    """Return the columns named in ``template``, in order.

    Raises TemplateError for an invalid format string, for a field that is not a column name
    (``{}``, ``{0}``, ``{prompt.upper}``), and for a template without a field.

    >>> fields_of("Question: {question}\\nAnswer ({level:02d}):")
    ['question', 'level']
    """
    try:
        parts = list(string.Formatter().parse(template))
    except ValueError as error:
        raise TemplateError(
            f"prompt_template {template!r} cannot be filled in: {error}. {_FORM}"
        ) from error
    names = [name for _, name, _, _ in parts if name is not None]
    for name in names:
        if not name or name.isdigit() or any(c in name for c in ".[{"):
            raise TemplateError(
                f"prompt_template {template!r} cannot be filled in: the field {{{name}}} is not "
                f"a column name. {_FORM}"
            )
    if any("{" in (spec or "") for _, _, spec, _ in parts):
        raise TemplateError(
            f"prompt_template {template!r} has a field inside another field. {_FORM}"
        )
    if not names:
        doubled = " ({{ and }} are braces, not a field)" if "{{" in template else ""
        raise TemplateError(
            f"prompt_template {template!r} has no field{doubled}, so every prompt would be the "
            f"same text. {_FORM}"
        )
    return list(dict.fromkeys(names))


def template_rules(template: str | None, files: Sequence[str]) -> Iterator[str]:
    """Yield an error for each problem of a ``prompt_template`` over the rows of ``files``."""
    if template is None:
        return
    try:
        names = fields_of(template)
    except TemplateError as error:
        yield str(error)
        return
    for name in names:
        for line in missing_columns(files, {"prompt_template": name}):
            yield line.replace(f"prompt_template={name}", f"prompt_template needs {{{name}}}", 1)


_FORM = (
    "It is a Python format string: {column} for a column by its name, {column:.2f} with a format, "
    "{{ and }} for braces"
)
