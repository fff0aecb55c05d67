"""Rows of one step as the page lists them: filtered, sorted, with short texts."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from burnish.errors import BurnishError
from burnish.watch.texts import TextMatch

_SHORT = 400
"""Characters of a text in the list."""
_WORD = re.compile(
    r'(?P<name>"[^"]+"|[^\s<>=!"]+)\s*(?P<sign><=|>=|!=|=|<|>)\s*(?P<value>"[^"]*"|[^\s"]+)'
    r'|(?P<text>"[^"]*"?|[^\s"]+)'
)
"""A condition, or a text: a word, or anything in quotes."""
_OPERATORS: Mapping[str, Callable[[Any, Any], bool]] = {
    "<=": operator.le,
    ">=": operator.ge,
    "!=": operator.ne,
    "=": operator.eq,
    "<": operator.lt,
    ">": operator.gt,
}
_NAMES = ("finish", "sample", "dropped", "label")
"""Columns of texts, which are compared as they are."""
COLUMNS = ("reward", "advantage", "tokens", "version", "group", *_NAMES)
"""Columns of the list by which rows are sorted and filtered, in addition to ``parts.NAME``."""


class FilterError(BurnishError, ValueError):
    """A condition on a column that does not exist, or a number that is none."""


@dataclass(frozen=True)
class Condition:
    """A comparison of a column with a value."""

    column: str
    sign: str
    value: float | str

    def holds(self, row: Mapping[str, Any]) -> bool:
        """Return whether a row of :func:`list_row` fulfills it. A missing value fulfills only
        ``!=``."""
        value = column_of(row, self.column)
        if isinstance(self.value, str):
            value = None if value is None else str(value)
        if value is None or isinstance(value, str) != isinstance(self.value, str):
            return self.sign == "!="
        return _OPERATORS[self.sign](value, self.value)


@dataclass(frozen=True)
class Filter:
    """Conditions and texts, all of which a row has to fulfill."""

    conditions: tuple[Condition, ...]
    texts: tuple[str, ...]

    def holds(self, row: Mapping[str, Any], sample: Mapping[str, Any]) -> bool:
        """Return whether a row, with the complete texts of its ``sample``, fulfills it."""
        return all(condition.holds(row) for condition in self.conditions) and all(
            TextMatch(text).first(sample) is not None for text in self.texts
        )


def parse_filter(query: str, columns: Sequence[str]) -> Filter:
    """Return the filter of a query such as ``reward>0.5 finish=length word "some words"``:
    conditions on ``columns``, and texts.

    Raises FilterError for a condition on an unknown column, and for an ordering (``<``) by
    something that is not a number.

    >>> parse_filter('reward > 0.5 "x=1" two', ["reward"])
    Filter(conditions=(Condition(column='reward', sign='>', value=0.5),), texts=('x=1', 'two'))
    """
    conditions: list[Condition] = []
    texts: list[str] = []
    for word in _WORD.finditer(query):
        if word["text"] is not None:
            texts.append(word["text"].strip('"'))
            continue
        name, sign, text = word["name"].strip('"'), word["sign"], word["value"].strip('"')
        if name not in columns:
            raise FilterError(
                f"there is no column {name!r}; to search for the text, put it in quotes: "
                f'"{word[0]}". Columns: {", ".join(columns)}'
            )
        number = _number(text)
        if number is None and sign in ("<", ">", "<=", ">="):
            raise FilterError(f"{word[0]}: {text} is not a number")
        is_text = number is None or name in _NAMES
        conditions.append(Condition(name, sign, text if is_text or number is None else number))
    return Filter(tuple(conditions), tuple(filter(None, texts)))


def _number(text: str) -> float | None:
    try:
        number = float(text)
    except ValueError:
        return None
    return number if math.isfinite(number) else None


def column_of(row: Mapping[str, Any], column: str) -> Any:
    """Return the value of a column; of ``parts.NAME``, a part of the reward."""
    group, _, name = column.partition(".")
    return row["parts"].get(name) if group == "parts" else row.get(column)


def list_row(sample: Mapping[str, Any]) -> dict[str, Any]:
    """Return what the list shows of a row of a sample file."""
    prompt, response = str(sample["prompt"] or ""), str(sample["response"] or "")
    label = sample["label"]
    return {
        "sample": sample["sample_id"],
        "step": sample["step"],
        "split": sample["split"],
        "group": sample["group_id"],
        "prompt": shortened(prompt),
        "response": shortened(response),
        "label": None if label is None else shortened(str(label)),
        "reward": finite(sample["reward"]),
        "parts": parts_of(sample["reward_parts"]),
        "advantage": finite(sample["advantage"]),
        "tokens": sample["response_tokens"],
        "finish": sample["finish_reason"],
        "version": sample["version"],
        "dropped": sample.get("dropped"),
        "is_episode": sample["episode"] is not None,
    }


def shortened(text: str, limit: int = _SHORT) -> str:
    """Return a text without its middle if it is longer than ``limit``.

    >>> shortened("abcdefghij", 4)
    'ab […] ij'
    """
    half = limit // 2
    return text if len(text) <= limit else f"{text[:half]} […] {text[-half:]}"


def finite(value: Any) -> float | None:
    """Return a number, or None for what is not a finite one."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    try:
        return value if math.isfinite(value) else None
    except OverflowError:
        return None


def parts_of(text: Any) -> dict[str, float | None]:
    """Return the parts of a reward from their JSON; empty if it is damaged."""
    try:
        parts = json.loads(text or "{}")
    except (ValueError, TypeError, RecursionError):
        return {}
    return {str(k): finite(v) for k, v in parts.items()} if isinstance(parts, dict) else {}


def chosen_rows(
    samples: Sequence[Mapping[str, Any]], query: str, *, sort: str, descending: bool
) -> list[dict[str, Any]]:
    """Return the rows of a step that fulfill a query, sorted by a column (rows without a value
    last) or, with ``sort`` "", in the order of the file. Raises FilterError."""
    rows = [list_row(sample) for sample in samples]
    parts = sorted({f"parts.{name}" for row in rows for name in row["parts"]})
    columns = [*COLUMNS, *parts]
    chosen = parse_filter(query, columns)
    kept = [r for r, s in zip(rows, samples, strict=True) if chosen.holds(r, s)]
    if not sort:
        return kept
    if sort not in columns:
        raise FilterError(f"there is no column {sort!r}; columns: {', '.join(columns)}")
    known = [row for row in kept if column_of(row, sort) is not None]
    known.sort(key=lambda row: column_of(row, sort), reverse=descending)
    return known + [row for row in kept if column_of(row, sort) is None]
