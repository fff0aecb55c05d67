"""Descriptions of a tool and of its parameters from its docstring.

Sections of parameters (Google's format) are read; sections of results and exceptions are left out,
because the policy sees both when it calls the tool. All other text is the tool's description:
also other sections (``Note:``, ``Example:``), entries of names that are no parameters, and the
forms of NumPy and Sphinx.
"""

from __future__ import annotations

import re  # house: ok patterns over single lines of the user's own docstrings
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

_PARAMETERS = re.compile(
    r"((other )?(parameters|params)|(keyword )?(args|arguments)):\s*", re.IGNORECASE
)
_LEFT_OUT = re.compile(r"(Returns?|Yields?|Raises|Throws):(\s.*)?")
_ENTRY = re.compile(r"(\*{0,2}\w+(?:\s*,\s*\*{0,2}\w+)*)\s*(?:\(.*?\)\s*)?:(?:\s+(.*)|$)")


@dataclass
class ToolTexts:
    """Texts of a docstring."""

    description: str
    parameters: dict[str, str] = field(default_factory=dict)
    """Name -> description."""


def read_docstring(docstring: str, names: Collection[str]) -> ToolTexts:
    """Return the texts of a docstring whose indentation is cleaned (``inspect.getdoc``). ``names``:
    parameters of the function.

    >>> read_docstring("Add.\\n\\nArgs:\\n    a (int): The first.\\n\\nNote:\\n    Slow.", ["a"])
    ToolTexts(description='Add.\\n\\nNote:\\n    Slow.', parameters={'a': 'The first.'})
    """
    lines = docstring.split("\n")
    texts: dict[str, list[str]] = {}
    description: list[str] = []
    place = 0
    while place < len(lines):
        end, section = place + 1, [lines[place]]
        if _PARAMETERS.fullmatch(lines[place].strip()):
            end_of_section = _section_end(lines, place)
            entries, others = _entries(lines[place + 1 : end_of_section], names)
            for name, parts in entries:
                texts.setdefault(name, []).extend(parts)
            if entries:
                end, section = end_of_section, [lines[place], *others] if others else []
        elif _LEFT_OUT.fullmatch(lines[place]):
            end, section = _section_end(lines, place), []
        if not section and description and not description[-1].strip():
            while end < len(lines) and not lines[end].strip():  # one blank line is enough
                end += 1
        description += section
        place = end
    joined = {name: " ".join(filter(None, parts)) for name, parts in texts.items()}
    return ToolTexts("\n".join(description).strip(), joined)


def _section_end(lines: Sequence[str], header: int) -> int:
    """Return the line at which the section of a header line ends: the next line that is not
    indented deeper, or, if the first one is not, the next blank line or header."""
    depth, first = _depth(lines[header]), header + 1
    while first < len(lines) and not lines[first].strip():
        first += 1
    if first == len(lines):
        return first
    if _depth(lines[first]) > depth:
        end = first
        while end < len(lines) and (not lines[end].strip() or _depth(lines[end]) > depth):
            end += 1
        while not lines[end - 1].strip():
            end -= 1
        return end
    end = header + 1
    while end < len(lines) and lines[end].strip() and not _is_header(lines[end]):
        end += 1
    return end


def _is_header(line: str) -> bool:
    return bool(_PARAMETERS.fullmatch(line.strip()) or _LEFT_OUT.fullmatch(line))


def _entries(
    lines: Sequence[str], names: Collection[str]
) -> tuple[list[tuple[str, list[str]]], list[str]]:
    """Return the parameters of a section with the parts of their texts, and the lines that belong
    to none: entries of other names."""
    depth = next((_depth(line) for line in lines if line.strip()), 0)
    entries: list[tuple[str, list[str]]] = []
    others: list[str] = []
    current: list[str] | None = None
    for line in lines:
        entry = _ENTRY.fullmatch(line.strip()) if _depth(line) <= depth else None
        if entry is not None:
            described = [name.lstrip("*") for name in re.split(r"\s*,\s*", entry[1])]
            current = [(entry[2] or "").strip()] if set(described) <= set(names) else None
            entries += [(name, current) for name in described if current is not None]
        elif current is not None:
            current.append(line.strip())
        if current is None and line.strip():
            others.append(line)
    return entries, others


def _depth(line: str) -> int:
    return len(line) - len(line.lstrip())
